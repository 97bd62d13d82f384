"""`python -m zerocheck`."""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Until the command line has its handlers: an interrupt ends imports without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from .cli import main

if __name__ == "__main__":
    main(prog_name="python -m zerocheck")
