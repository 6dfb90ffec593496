"""Lets PyPI's torchvision (a CUDA build) import beside a CPU build of torch.

Its compiled library does not load there, and the import stops at "operator torchvision::nms
does not exist". Declaring the two operators first is enough: SGLang and transformers import
torchvision, but a text model runs none of its operators. Put on the path by
``scripts/cpu_env.sh``; it then hands over to the real package.
"""

import sys

import _next_on_path
import torch

_library = torch.library.Library("torchvision", "DEF")
for _op in ("nms", "qnms"):
    _library.define(f"{_op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

if not _next_on_path.load("torchvision"):
    raise ModuleNotFoundError("No module named 'torchvision'", name="torchvision")
sys.modules["torchvision"]._dcut_cpu_ops = _library  # collected, it undefines its operators
