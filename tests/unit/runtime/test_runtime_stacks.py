"""What faulthandler wrote, in a line a thread."""

from dryfit.processes.evidence import innermost_frames

TEXT = """Fatal Python error: something of before

--- process 12, python, sleeping
Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
  File "/home/a/loader.py", line 4 in fetch
  File "/home/a/loader.py", line 5 in upper

Current thread 0x00007f02 (most recent call first):
  File "/home/a/loop.py", line 9 in step

--- process 13, pt_data_worker, stopped

--- process 14, python, disk-sleep
Current thread 0x00007f03 (most recent call first):
  <no Python frame>
"""


def test_each_thread_has_a_line_and_who_is_silent_is_told():
    assert innermost_frames(TEXT).splitlines() == [
        "process 12, python, sleeping: wait (threading.py:320) < fetch (loader.py:4)",
        "process 12, python, sleeping: step (loop.py:9)",
        "process 13, pt_data_worker, stopped: gave no stack",
    ]
    assert innermost_frames(TEXT, 13).splitlines()[0].startswith("process 13,"), "the child's own come first"


def test_many_threads_are_counted_and_nothing_gives_nothing():
    thread = 'Thread 0x1 (most recent call first):\n  File "a.py", line 1 in f\n'
    lines = innermost_frames("--- process 1, python, sleeping\n" + thread * 40).splitlines()
    assert len(lines) == 13
    assert lines[-1] == "and 28 more threads"
    assert innermost_frames("") == "" == innermost_frames("no stack at all")
