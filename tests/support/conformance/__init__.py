"""Conformance tests: one contract for several implementations.

Invariant: a subclass adds a fixture and nothing else.

class TestMyObjects(ObjectStoreContract):
    @pytest.fixture
    def objects(self): ...
"""

from tests.support.conformance.index_contract import IndexContract
from tests.support.conformance.object_contract import ObjectStoreContract

__all__ = ["IndexContract", "ObjectStoreContract"]
