"""TRL's DPO step: the loss, metrics and gradients of its trainer on pairs of tokens, and plain SGD."""

import importlib
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np


def dpo_step(
    model: Any, batch: dict[str, np.ndarray], *, micro_batches: int, beta: float, learning_rate: float
) -> Callable[[], Any]:
    """A function that makes one step, and returns its loss.

    The reference's log-probabilities are given to the trainer, as 0. `model`: transformers', in the dtype of the
    computation. `batch`: `input_ids` and `labels` (pairs, 2, T), the chosen answer first; labels are -100 where a token
    does not count. `micro_batches`: of a step. `beta`: DPO's. `learning_rate`: SGD's.
    """
    torch, trl, datasets, tokenizers, transformers = map(
        importlib.import_module, ("torch", "trl", "datasets", "tokenizers", "transformers")
    )

    class Trainer(trl.DPOTrainer):
        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset  # tokens already

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    device = next(model.parameters()).device
    with tempfile.TemporaryDirectory() as folder:
        options = trl.DPOConfig(
            folder, beta=beta, precompute_ref_log_probs=True, max_length=None,
            gradient_accumulation_steps=micro_batches,
            bf16=False, use_cpu=device.type == "cpu", report_to="none", disable_tqdm=True,
        )  # fmt: skip
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="b", pad_token="a")
        example = {"prompt_ids": [0], "chosen_ids": [1], "rejected_ids": [2]}  # the trainer wants a dataset
        dataset = datasets.Dataset.from_list([example])
        trainer = Trainer(model=model, args=options, train_dataset=dataset, processing_class=tokenizer)
    trainer.current_gradient_accumulation_steps = micro_batches
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)

    def inputs_of(ids: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
        """A micro-batch of pairs, all chosen ones first. Padding is behind a row's last token that counts."""
        ids, counts = (x.swapaxes(0, 1).reshape(-1, x.shape[-1]) for x in (ids, labels != -100))
        is_token = np.flip(np.cumsum(np.flip(counts, 1), axis=1), 1) > 0
        named = dict(input_ids=ids, attention_mask=is_token, completion_mask=counts)
        inputs = {name: torch.tensor(x, dtype=torch.int64, device=device) for name, x in named.items()}
        reference = torch.zeros(len(ids) // 2, device=device)
        return inputs | {"ref_chosen_logps": reference, "ref_rejected_logps": reference}

    cut = zip(*(np.array_split(batch[name], micro_batches) for name in ("input_ids", "labels")), strict=True)
    all_inputs = [inputs_of(ids, labels) for ids, labels in cut]

    def step() -> Any:
        loss = sum(trainer.training_step(model, dict(inputs)) for inputs in all_inputs)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step
