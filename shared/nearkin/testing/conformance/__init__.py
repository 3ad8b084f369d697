"""Conformance: one contract, many stores. Invariant: a subclass brings a fixture and nothing else.

class TestMyObjects(ObjectStoreContract):
    @pytest.fixture
    def objects(self): ...
"""

from nearkin.testing.conformance.index import IndexContract
from nearkin.testing.conformance.objects import ObjectStoreContract

__all__ = ["IndexContract", "ObjectStoreContract"]
