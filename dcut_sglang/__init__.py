"""D-Cut for SGLang: verify only the draft tokens that pay for themselves.

Map of the package (data flows downwards; only ``host/`` imports sglang):

``survival``   confidences -> survival probabilities -> the K best drafts of a batch
``selector``   how many to keep: expected tokens over measured cost
``controller`` whether a step drafts for all requests, for none, or for a few
``cost``       the cost table; ``probe`` measures one within a time budget
``force``      a forced choice (ratio, lengths, random, plain) instead of the selector's
``accept``     greedy acceptance over packed rows, capped at the verify lengths
``varlen``     attention over variable-length queries, FlashInfer's plan/run interface, in torch
``config``     everything that can be set
``trace``      what each step knew, chose, got and paid, written and read back
``replay``     any policy on recorded texts, the best possible, a load simulator
``published``  the tables of the D-Cut page, recomputed
``bench``      measuring servers from outside
``training``   the DFlash drafter as a torch module: training, evaluation, export
``host``       the SGLang adapter; the decode step is ``host/worker.py``
"""

__version__ = "0.1.0"
