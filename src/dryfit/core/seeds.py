"""Seeds derived by hashing, independent of the order of calls."""

import hashlib

_SEED_BITS = 31


def derive_seed(*parts: object) -> int:
    """Derive a seed in ``[0, 2**31)`` from any sequence of printable parts.

    Equal parts give the same seed on every platform and Python version (SHA-256 of their text); different parts give
    independent seeds.
    """
    text = "\x1f".join(str(part) for part in parts)
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - _SEED_BITS)
