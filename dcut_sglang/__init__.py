"""D-Cut for SGLang: verify only the draft tokens that pay for themselves.

Map of the package (data flows downwards; only ``host/`` imports sglang):

``survival``   confidences -> survival probabilities -> the K best drafts of a batch
``force``      a forced choice (ratio, lengths, plain, full) instead of the selector's
``varlen``     attention over variable-length queries, FlashInfer's plan/run interface, in torch
``training``   the DFlash drafter as a torch module: training, evaluation, export
``host``       the SGLang adapter; the decode step is ``host/worker.py``
"""

__version__ = "0.1.0"
