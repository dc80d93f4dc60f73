"""What is kept of a failure: the exception, the place, what was in hand."""

import faulthandler
import tempfile

from dryfit.ledger.events import FaultDetail
from dryfit.processes.child import describe_fault
from dryfit.processes.failures import fault_detail
from dryfit.settings.errors import ChildFault, Evidence, FailureKind


def fail() -> None:
    raise KeyError("label")


def described() -> ChildFault:
    try:
        fail()
    except KeyError as error:
        return describe_fault(error)


def test_an_exception_s_class_words_and_place():
    found = fault_detail(FailureKind.USER_CODE, Evidence(exit_code=1), described())
    assert found.error_type == "builtins.KeyError"
    assert found.error == "'label'"
    assert found.place.startswith("runtime/test_fault_detail.py:") and found.place.endswith("in fail")
    assert "test_fault_detail.py" in found.detail and " in described" in found.detail


def test_the_place_is_the_innermost_that_is_no_library_s():
    trace = (
        'Traceback (most recent call last):\n  File "/home/me/model.py", line 7, in forward\n    x()\n'
        '  File "/venv/lib/python3.12/site-packages/torch/nn/functional.py", line 2, in linear\n    y\nValueError: z\n'
    )
    fault = ChildFault(("builtins.ValueError",), "", "z", trace, "batch of rows 3, 4")
    found = fault_detail(FailureKind.USER_CODE, Evidence(), fault)
    assert found.place == "me/model.py:7 in forward"
    assert found.detail.splitlines()[0] == "batch of rows 3, 4"
    assert found.detail.splitlines()[-1].endswith("torch/nn/functional.py:2 in linear")
    only_libraries = ChildFault(("a.B",), "", "z", trace.replace("/home/me/", "/usr/lib/python3.12/"))
    assert fault_detail(FailureKind.USER_CODE, Evidence(), only_libraries).place == "nn/functional.py:2 in linear"


def test_a_crash_is_placed_by_its_stacks():
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        stacks = "Fatal Python error: Segmentation fault\n\n" + file.read()
    found = fault_detail(FailureKind.NATIVE_CRASH, Evidence(signal=11, log_tail="a\n\nb"), None, stacks)
    assert found.place.endswith("in test_a_crash_is_placed_by_its_stacks")
    assert found.error_type == found.error == ""
    assert found.detail.endswith("a\nb")


def test_of_several_threads_the_one_that_was_asked():
    stacks = (
        'Thread 0x01 (most recent call first):\n  File "wait.py", line 1 in wait\n\n'
        'Current thread 0x02 (most recent call first):\n  File "inner.py", line 2 in inner\n'
        '  File "outer.py", line 3 in outer\n\nThread 0x03 [name] (most recent call first):\n'
        '  File "other.py", line 4 in other\n'
    )
    found = fault_detail(FailureKind.HANG, Evidence(killed_by_us="hang"), None, stacks)
    assert found.place == "inner.py:2 in inner"
    assert found.detail == "at outer.py:3 in outer\nat inner.py:2 in inner"


def test_memory_facts_come_with_a_lack_of_it():
    evidence = Evidence(planned_bytes=2 << 30, peak_bytes=3 << 30, device_free_bytes=1 << 20, neighbour_bytes=0)
    found = fault_detail(FailureKind.OOM_DEVICE, evidence, ChildFault(("torch.OutOfMemoryError",), "", "x"))
    assert found.detail == "planned 2.0 GiB, taken 3.0 GiB, free 1 MiB, held by others 0 MiB"


def test_nothing_known_is_nothing_told():
    assert fault_detail(FailureKind.KILLED, Evidence(), None) == FaultDetail()
    assert fault_detail(FailureKind.USER_CODE, Evidence(log_tail="secret"), ChildFault((), "", "")) == FaultDetail()


def test_all_of_it_has_a_limit():
    huge = ChildFault(("a.B",), "", "x\n" * 10**6, 'File "f", line 1, in g\n' * 10**4, "c" * 10**6)
    found = fault_detail(FailureKind.USER_CODE, Evidence(), huge)
    assert len(found.error) <= 2_000 and len(found.detail) <= 4_000
