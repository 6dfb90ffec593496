"""Entry point of the ``sglang.srt.plugins`` group: registers speculative algorithm ``DCUT``.

SGLang loads this in every process (launcher, scheduler ranks, detokenizer) and swallows what
it raises, so nothing here may fail: where this SGLang cannot carry DCUT, the name is
registered all the same and refuses with the reason as soon as somebody asks for it.
"""

from __future__ import annotations

import logging
import multiprocessing

logger = logging.getLogger(__name__)


def register() -> None:
    """Register DCUT, and the hooks it needs; idempotent. On a CPU, the attention backend too."""
    from dcut_sglang.host import compat

    # The launcher has looked before it spawned anything; looking imports what it looks at.
    problems = compat.problems() if multiprocessing.parent_process() is None else []
    if any(problem.fatal for problem in problems):
        for problem in problems:
            logger.error("dcut_sglang: %s", problem.sentence)
        return

    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import get_spec

    from dcut_sglang.host.algorithm import NAME, DCutAlgorithm, worker_class
    from dcut_sglang.host.cpu.activate import cpu_engine_enabled
    from dcut_sglang.host.hooks import register_hooks

    if get_spec(NAME) is not None:
        return
    DCutAlgorithm.problems = tuple(problem.sentence for problem in problems)
    SpeculativeAlgorithm.register(
        NAME,
        supports_overlap=True,
        validate_server_args=DCutAlgorithm.check_server_args,
        spec_class=DCutAlgorithm,
    )(worker_class)
    if problems:
        return
    if cpu_engine_enabled():
        from dcut_sglang.host.cpu.backend import register_attention

        register_attention()
    register_hooks()
