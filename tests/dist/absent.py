"""``python -m trainer`` on ranks of which the last never comes, and rank 1 is asked to end while it waits for it."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

from trainer.__main__ import main
from trainer.interrupts import leave


def asked() -> None:
    """Once this rank has come, which listens to signals by then."""
    import trainer.world

    real = trainer.world._meet

    def meet(*arguments: object) -> object:
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return real(*arguments)  # type: ignore[arg-type]

    trainer.world._meet = meet  # type: ignore[assignment]
    began = time.monotonic()
    code = main(sys.argv[1:])
    Path("asked").write_text(f"{time.monotonic() - began - 1}")
    leave(code)


if __name__ == "__main__":
    if os.environ["RANK"] == "2":
        time.sleep(12)
    elif os.environ["RANK"] == "1":
        asked()
    else:
        leave(main(sys.argv[1:]))
