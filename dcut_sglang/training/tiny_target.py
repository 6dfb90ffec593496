"""The tiny target: its tokenizer, its Llama model and its training."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import tokenizers
import torch
import torch.nn.functional as F
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dcut_sglang.training.fit import Optimizer
from dcut_sglang.training.synthetic import Document

VOCAB_SIZE = 576
BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
MASK = "<|MASK|>"  # the name that SGLang looks up by default
# (rows, tokens per row) of successive steps: short rows are cheap, long ones teach positions.
ROW_SHAPES = ((4, 256), (4, 256), (4, 256), (2, 576))


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with single digits; every ASCII text survives encoding and decoding."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, BOS, EOS, MASK],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    # Every id of the model has a token, so that a server can name whatever is sampled.
    num_spare = VOCAB_SIZE - tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([f"<|spare{i}|>" for i in range(num_spare)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        mask_token=MASK,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
        chat_template="{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}",
    )


def new_target(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A small Llama whose shapes suit grouped-query attention, two ranks and common kernels."""
    config = LlamaConfig(  # type: ignore[call-arg]
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        rope_theta=10000.0,
    )
    target = LlamaForCausalLM(config).float()
    for name, parameter in target.model.layers.named_parameters():
        if parameter.dim() == 2:
            # Larger than the library's 0.02, which is meant for wide models and learns slowly here.
            is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
            torch.nn.init.normal_(parameter, std=0.02 if is_output else 0.06)
    return target


def encode_document(tokenizer: PreTrainedTokenizerFast, document: Document) -> list[int]:
    """Returns token ids with the leading BOS and, where the text ends, EOS."""
    ids = tokenizer.encode(document.prompt + document.text)
    return [*ids, tokenizer.eos_token_id] if document.ends else ids


def train_target(
    target: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    stream: Iterator[Document],
    num_steps: int,
    log: Callable[[str], None] = print,
) -> None:
    """Next-token training in place, on rows of documents packed back to back."""
    matrices = [p for n, p in target.named_parameters() if p.dim() == 2 and "embed" not in n]
    others = [p for n, p in target.named_parameters() if p.dim() != 2 or "embed" in n]
    optimizer = Optimizer(matrices, others, 4e-3, num_steps, 20, 0.5)
    average = 0.0
    for step in range(num_steps):
        rows = []
        num_rows, row_tokens = ROW_SHAPES[step % len(ROW_SHAPES)]
        for _ in range(num_rows):
            row: list[int] = []
            while len(row) <= row_tokens:
                row += encode_document(tokenizer, next(stream))
            rows.append(row[: row_tokens + 1])
        ids = torch.tensor(rows)
        logits = target(ids[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.step(loss)
        average = loss.item() if step == 0 else 0.95 * average + 0.05 * loss.item()
        if step % 25 == 0 or step == num_steps - 1:
            log(f"target step {step}/{num_steps} loss {average:.3f} nats")


def save_target(target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes into a temporary folder first, so that a killed run leaves no half-written target."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temp:
        target.save_pretrained(temp)
        tokenizer.save_pretrained(temp)
        folder.mkdir(exist_ok=True)
        for path in sorted(Path(temp).iterdir()):
            os.replace(path, folder / path.name)
