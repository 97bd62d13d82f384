"""`python -m zerocheck`."""

import signal
import sys

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Until the command line has its handlers: an interrupt ends imports without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from .errors import ExitCode, not_installed

try:
    from .cli import main
except ImportError as error:
    message = not_installed(error)
    if message is None:
        raise
    sys.stderr.write(f"error: {message}\n")
    sys.exit(ExitCode.USAGE)

if __name__ == "__main__":
    main(prog_name="python -m zerocheck")
