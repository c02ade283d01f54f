"""One rank under a watchdog, without torch: takes part in an imagined training until its part in the play comes.

    watched_worker.py FOLDER RANK WORLD_SIZE PART [key=value …]

`share` goes through a file in FOLDER. Each rank writes `pids-RANK` once all guardians are connected.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

from finetune.distributed.watchdog import Watchdog
from finetune.errors import FinetuneError
from finetune.signals import leave_signals_to_parent

FOLDER, RANK, WORLD_SIZE, PART = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
OPTIONS = dict(word.split("=", 1) for word in sys.argv[5:])
LONG_SECONDS = 60.0


def write(name, value):
    partial = FOLDER / f".{name}-{RANK}"
    partial.write_text(json.dumps(value))
    partial.rename(FOLDER / name)


def read(name, seconds=30.0):
    end = time.monotonic() + seconds
    while not (FOLDER / name).exists():
        assert time.monotonic() < end, f"{name} did not come"
        time.sleep(0.01)
    return json.loads((FOLDER / name).read_text())


def share(value):
    if RANK == 0:
        write("share", value)
    return read("share")


def watch():
    seconds = float(OPTIONS.get("step_timeout", 0))
    return Watchdog(
        rank=RANK,
        world_size=WORLD_SIZE,
        master_addr="127.0.0.1",
        launcher_pid=os.getppid() if "launched" in OPTIONS else None,
        step_timeout_seconds=seconds or None,
        broadcast=share,
        last_words=lambda fault: write(f"last-words-{RANK}", str(fault)),
    )


def wait_in_sum(dog, step=12):
    dog.enter_phase("training", step)
    with dog.waiting("sum"):
        time.sleep(LONG_SECONDS)


def fail(dog):
    dog.enter_phase("evaluation", 40)
    dog.fail("DataError: row 7\nis no conversation")
    sys.exit(2)


def fail_at_second_hand(dog):
    """As when a peer's death breaks a connection, and this rank is the first to speak."""
    dog.enter_phase("training", 12)
    try:
        with dog.waiting("sum"):
            if "after" in OPTIONS:
                read(OPTIONS["after"])
            raise ConnectionError("connection closed by peer")
    except ConnectionError as error:
        dog.fail(str(error))
    time.sleep(LONG_SECONDS)


def hang(dog):
    dog.enter_phase("training", 12)
    time.sleep(LONG_SECONDS)


def hold_all_threads(dog):
    """A C call that keeps Python's lock: no other thread of this process runs meanwhile."""
    dog.enter_phase("training", 12)
    ctypes.PyDLL(None).sleep(int(OPTIONS["seconds"]))
    dog.close()


def leave(dog):
    dog.enter_phase("done")
    dog.close()
    dog.close()
    write(f"left-{RANK}", time.time())


def leave_when_told(dog):
    dog.enter_phase("testing", timed=False)
    read("leave-now")
    dog.close()


def leave_and_live_on(dog):
    dog.close()
    write(f"left-{RANK}", time.time())
    read("leave-now")


def fork_a_data_loader(dog):
    """The child shares every open file of this process, and would live on when it is killed."""
    if os.fork() == 0:
        leave_signals_to_parent()
        dog.enter_phase("nonsense", 99)
        dog.fail("nonsense")
        dog.close()
        time.sleep(LONG_SECONDS)
        os._exit(0)
    time.sleep(float(OPTIONS["seconds"]))
    dog.enter_phase("training", 12)
    write("is-settled", True)
    time.sleep(LONG_SECONDS)


def main():
    # A shell in the background starts its children deaf to Ctrl-C; a killed test must be able to end them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "streams" in OPTIONS:
        os.closerange(0, 3)
    try:
        dog = watch()
    except FinetuneError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.exit(error.exit_code)
    if "streams" in OPTIONS:
        for stream in range(3):
            os.write(stream, b"what a library prints\n")
    write(f"pids-{RANK}", {"worker": os.getpid(), "guardian": dog._guardian.pid})
    globals()[PART](dog)


if __name__ == "__main__":
    main()
