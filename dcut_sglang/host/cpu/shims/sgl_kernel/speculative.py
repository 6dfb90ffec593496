"""The one name that SGLang imports from ``sgl_kernel.speculative`` on a CPU."""

from sgl_kernel._drafts import reconstruct_indices_from_tree_mask

__all__ = ["reconstruct_indices_from_tree_mask"]
