"""What of a pipeline needs no second process: torch's version, and times by micro-batch."""

import pytest

from hf_sparsebalance.errors import UserError
from hf_sparsebalance.pipeline import check_torch
from hf_sparsebalance.timing import MicroBatchTime, OperationTime, micro_batch_times


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.12.1+cu130"])
def test_known_torch_passes(version):
    """The versions that were tried are accepted, whatever their build."""
    check_torch(version)


@pytest.mark.parametrize("version", ["2.10.1", "2.15.0", "3.0.0a0+git12"])
def test_unknown_torch_is_refused(version):
    """Older and newer versions are refused with those that work, before a name is missing."""
    with pytest.raises(UserError, match="works with torch 2.11 to 2.1"):
        check_torch(version)


def test_times_of_a_micro_batch_are_sums_over_its_operations():
    """Two stages and a split backward: forward and backward add up, and the start is the first operation's."""
    operations = [
        OperationTime("F", 0, 0, 1.0, 3.0),
        OperationTime("F", 0, 1, 3.0, 4.0),
        OperationTime("F", 3, 0, 5.0, 6.0),
        OperationTime("I", 3, 0, 7.0, 8.5),
        OperationTime("W", 3, 0, 9.0, 9.25),
        OperationTime("B", 0, 0, 10.0, 14.0),
        OperationTime("B", 0, 1, 14.0, 16.0),
    ]
    assert micro_batch_times(operations) == [MicroBatchTime(1.0, 3.0, 5.75), MicroBatchTime(3.0, 1.0, 2.0)]
