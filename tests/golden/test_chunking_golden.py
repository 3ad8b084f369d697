"""Check frozen cut points.

If one changes, new data no longer deduplicates against stored data.
"""

import hashlib

import numpy as np
import pytest
from numpy.typing import NDArray

from nearkin_shared.kernels import chunking


def corpus() -> bytes:
    """Return 1.25 MiB from SHAKE-256.

    Random bytes, text of few letters, zeros, a period of 777, random again.
    """
    random = hashlib.shake_256(b"nearkin chunking golden").digest(1 << 19)
    letters = bytes(b"etaoin shrdlu\n.,"[value & 15] for value in random[: 1 << 18])
    zeros = bytes(1 << 17)
    periodic = (random[:777] * 400)[: 1 << 17]
    return random + letters + zeros + periodic + random[::-1][: 1 << 18]


CORPUS = corpus()


def digest(lengths: NDArray[np.uint32]) -> str:
    return hashlib.sha256(np.cumsum(lengths, dtype="<u8").tobytes()).hexdigest()


def test_corpus_is_frozen() -> None:
    assert hashlib.sha256(CORPUS).hexdigest() == "b2d670ffb8fe09accd16326988ce88856cbd13668fe17025e522f9b77ce8e181"


@pytest.mark.parametrize(
    ("name", "bounds", "chunks", "frozen"),
    [
        ("fastcdc", (2048, 8192, 65536), 120, "444630403adce1fcb5695e5f8560c1999c7928af7d56578b7887d0719cdeee3d"),
        ("fastcdc", (512, 2048, 16384), 523, "b9727de6f9c1b1f129b827e869fa039e97c142094ef5a8938c1204da0635f373"),
        ("fastcdc", (64, 64, 921600), 14819, "8a2f6df6afabe70760ae79c967fbda89ffb3075802513ad795f64fe1eb93b309"),
        ("leastcdc", (2048, 8192, 65536), 158, "aefa6f8c8483ac2d24d7de521562147cf98602d5c68ad5a17888029421458619"),
        ("leastcdc", (512, 2048, 16384), 588, "4111fe672aa9622ca585036620aa2c51ddb88af95317ec9bbe853c34bfc627fb"),
        ("leastcdc", (64, 64, 921600), 17365, "14a6f9b318e669a42c693c49364680278f3049b04ba68a87b1271eb64957799b"),
        ("rabin", (2048, 8192, 65536), 167, "de277a57839f082a0dd14258b8a20828ba99e0524cfa8bb294a46b202b63c3af"),
        ("rabin", (512, 2048, 16384), 592, "79602ed79f3ace547266ea6ec6df666455c5d5c9b9e8b4e2d68ba4af6c0ec6d0"),
        ("rabin", (64, 64, 921600), 9076, "16f4d638ccf7dfe1a137beb92e57784712f9e725ab5d3e6349b7ce28125fe412"),
        ("inck", (2048, 8192, 65536), 100, "4fb2b60d74db21f87d5a6ef2ddef308c41984c43f3c3cdb8594b81b06ed5ab6b"),
        ("inck", (512, 2048, 16384), 605, "e51a426838e7a3223cd517823e7fb62c15b325c33a0c34ad7910e994292d15fa"),
        ("inck", (64, 64, 921600), 9435, "09f6237dad4c904eba56a79411e18a4560a255c36e460a3ec93977b1a08bffd0"),
        ("fixed", (8192,), 160, "8b2478c650c1676325645bb74cb64520975c5c7a2e6d03939ebd2a669aa92d24"),
        ("whole", (65536,), 20, "e1000ba801a38c6179dcb1f45d1265924c03e7ff64a9b0c6466fc99b7643190b"),
    ],
)
def test_cut_points_are_frozen(name: str, bounds: tuple[int, ...], chunks: int, frozen: str) -> None:
    lengths = getattr(chunking, f"{name}_cut")(CORPUS, *bounds, True)
    assert len(lengths) == chunks
    assert digest(lengths) == frozen  # else stored data stops deduplicating
