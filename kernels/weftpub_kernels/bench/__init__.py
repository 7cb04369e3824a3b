"""Measurements and proofs to run on a GPU: ``python -m weftpub_kernels.bench.verify`` and ``.quantize``, each with
``--out FILE``."""

__all__: list[str] = []
