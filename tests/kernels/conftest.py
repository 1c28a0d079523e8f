import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    """Thousands of tiny operations: threads that wait for each other on shared cores cost more than they give."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
