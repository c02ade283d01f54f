"""The same input as in tests/methods."""

from tests.methods.conftest import inputs as inputs
