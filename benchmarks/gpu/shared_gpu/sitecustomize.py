"""Let nccl connect ranks that share a GPU: each rank names a host of its own, because nccl refuses two on one host.

Python imports this when a process starts whose PYTHONPATH has this folder. Only the measurements use it: such ranks
talk through sockets, and wait for each other's turn on the GPU.
"""

import os

if "RANK" in os.environ:
    os.environ["NCCL_HOSTID"] = f"rank-{os.environ['RANK']}"
