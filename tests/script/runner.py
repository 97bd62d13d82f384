"""Run scripts one after the other, each in a fork of a process that has torch imported.

`python -I runner.py SCRIPT...` prints a line of JSON per script: its exit code and its output.
"""

import json
import os
import runpy
import sys
import tempfile
import traceback
import warnings

try:
    import zerocheck
except ImportError:
    pass
else:
    sys.exit(f"zerocheck is importable here: {zerocheck.__file__}")

warnings.simplefilter("ignore")
import torch  # noqa: E402
import torch._dynamo  # noqa: E402
import torch.distributed.fsdp  # noqa: E402
import torch.distributed.optim  # noqa: E402
import torch.distributed.tensor  # noqa: E402

torch.set_num_threads(1)


def exit_code(path: str) -> int:
    """As the interpreter gives it."""
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, int):
            return end.code
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


for path in sys.argv[1:]:
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if not child:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            code = exit_code(path)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        print(json.dumps([code, output.read()]), flush=True)
