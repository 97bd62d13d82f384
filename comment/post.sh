#!/usr/bin/env bash
# Post the text in FILE as the comment of the check NAME on pull request NUMBER of REPOSITORY, in
# place of its last one. The verdict of a job does not depend on this: where GitHub refuses, as it
# does with the read-only token of a fork, the outcome is a notice.
set -euo pipefail

export MARK="<!-- zerocheck: $NAME -->" LOGIN

body() {
  echo "$MARK"
  if [ -s "$FILE" ]; then
    cat "$FILE"
  else
    printf '### zerocheck: no report\n\nThe run ended before it wrote one. Its log has the reason.\n'
  fi
}

# Called where `set -e` does not hold.
post() {
  local comments="repos/$REPOSITORY/issues/$NUMBER/comments" own ids
  LOGIN=$(gh api graphql --raw-field query='{ viewer { login } }' --jq .data.viewer.login) || return
  # Anyone can write a comment with this mark.
  own='.[] | select(.user.login == env.LOGIN and (.body | startswith(env.MARK + "\n"))) | .id'
  ids=$(gh api "$comments?per_page=100" --paginate --jq "$own") || return
  if [ -n "$ids" ]; then
    set -- PATCH "repos/$REPOSITORY/issues/comments/${ids%%$'\n'*}"
  else
    set -- POST "$comments"
  fi
  body | gh api --method "$1" "$2" --field body=@- > /dev/null
}

post || echo "::notice title=zerocheck::The comment could not be written: a fork's token cannot, other" \
  "jobs need 'pull-requests: write'. The summary of the job has the report."
