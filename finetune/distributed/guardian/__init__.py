"""The guardian: a process beside each rank that notices killed, stopped, hung and cut-off ranks, and ends its own rank.

A worker cannot notice that it was killed or stopped, and its threads cannot run during a long C call that holds the
interpreter lock. A guardian needs only the standard library and psutil, so it starts in a tenth of a second. Rank 0's
guardian also runs the hub, to which all guardians report. All ranks name the first fault that reaches the hub.

Lines of JSON go between a guardian and its worker (stdin and stdout), and between a guardian and the hub (TCP).
"""
