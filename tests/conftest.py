"""Strict settings for every test: 8 CPU devices, no silent promotion of dtypes or ranks."""

import jax
import jaxtyping
import pytest

from tests.compiles import CompileCheck, quick_compiles

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def compiles():
    """Counts backend compiles while the test runs: `with compiles.none(): ...`."""
    with CompileCheck() as counter:
        yield counter


@pytest.fixture(name="quick_compiles")
def _quick_compiles():
    with quick_compiles():
        yield


@pytest.fixture
def no_shape_hook():
    """Turns off the annotations' checks, so that a test meets the errors that a user meets."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
