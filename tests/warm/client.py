"""Stand for a process that a server forks off; see `tests.warm`, which fills in the first two constants."""

import _signal
import marshal
import os
import socket
import sys
from contextlib import suppress

COLD = "an interpreter"
SERVER = "the address of the server"
MOST_DESCRIPTORS = 100
_FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCONT", "SIGWINCH")
_early = []
_process = []


def forward(number, _frame):
    """Send a signal on; one that comes too early waits."""
    if _process:
        with suppress(ProcessLookupError):
            os.kill(_process[0], number)
    else:
        _early.append(number)


def number_in(data):
    return int.from_bytes(data, "little", signed=True)


words = sys.argv[1:]
asked = words[1:] if words[:1] == ["-u"] else words  # as torchrun starts its workers
# As a sweep or a rehearsal starts its commands, a search what computes elsewhere, a comparison a server, an export what
# reads or writes models, and a run its helpers.
_MODULES = """
    finetune finetune.data.parallel finetune.data.rendering_process finetune.replay.trace
    finetune.training.rewards.tool_process onnxruntime_genai.models.builder vllm.entrypoints.openai.api_server
""".split()
_SCRIPTS = ("/plain_reload.py", "/export/compressor.py")
if words[:1] == ["-P"] and (words[1].endswith(_SCRIPTS) or (words[1] == "-m" and words[2] in _MODULES)):
    asked = words[1:]
is_other = not asked or (asked[0].startswith("-") and asked[0] != "-m")
found = [int(fd) for fd in os.listdir("/proc/self/fd")]  # noqa: PTH208 (importing pathlib takes longer)
descriptors = [fd for fd in found if os.access(f"/proc/self/fd/{fd}", os.F_OK)]  # that of the list is closed again
is_out_of_place = max(descriptors, default=0) > MOST_DESCRIPTORS
if "--multiprocessing-fork" in words[-1:] and words[-2].startswith("from multiprocessing.spawn import"):
    # A process of `multiprocessing`, and so of `torch.multiprocessing.spawn`, reads from pipes what to do.
    words = words[-3:]
    is_other = False
if is_other or is_out_of_place:
    # `-c`: what tests run so often shows that little is imported.
    os.execv(COLD, [COLD, *words])
ignored = []
for name in _FORWARDED:
    signal_number = getattr(_signal, name)
    if _signal.getsignal(signal_number) == _signal.SIG_IGN:
        ignored.append(int(signal_number))
    else:
        _signal.signal(signal_number, forward)
connection = socket.socket(socket.AF_UNIX)
connection.connect(SERVER)
request = marshal.dumps((words, os.getcwd(), dict(os.environ), ignored))
socket.send_fds(connection, [len(request).to_bytes(8, "little") + bytes(descriptors)], descriptors)
connection.sendall(request)
answer = connection.recv(8)
if not number_in(answer):
    for name in _FORWARDED:
        if int(getattr(_signal, name)) not in ignored:
            _signal.signal(getattr(_signal, name), _signal.SIG_DFL)
    connection.close()
    os.execv(COLD, [COLD, *words])
_process.append(number_in(answer))
while _early:
    forward(_early.pop(0), None)
status = connection.recv(8)
_process.clear()
code = os.waitstatus_to_exitcode(number_in(status)) if status else 70
if code < 0:
    if -code != _signal.SIGKILL:
        _signal.signal(-code, _signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
