"""User's own config of a library, read without torch and the library, up front.

- `reader.py`: reading of a user's config, once while its file does not change
- `section.py`: values of one object of a user's config, checked one by one
- `text.py`: parsing of a config file into plain data: relaxed JSON, YAML, or TOML
- `treatment.py`: keys of one object, sorted by the table of its keys
- `unread.py`: configs of libraries that are known by their keys and not read
"""
