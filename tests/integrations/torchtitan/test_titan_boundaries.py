"""A document's loss and gradients do not know what the other documents of its row hold: bit for bit, in the real trainer."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from titan_runs import LAYERS, LINE, run
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS

from lowbit_attn.integrations.torchtitan.attention import LowbitAttention

EXACT = "mxfp8:causal_safety=exact"
SPECIALS = 2 if LINE == "0.2" else 1  # tokens that torchtitan's loader adds to a document's bytes
LENGTHS = (22, SPECIALS, 37, 37 - SPECIALS)  # the second document is empty
SEQ_LEN = sum(LENGTHS)


class Seen:
    """What one training step computed: the loss of every token, and the gradients of q, k and v in every layer."""

    def __init__(self, out_dir: Path, documents: list[str], recipe: str, patch: pytest.MonkeyPatch) -> None:
        losses: list[torch.Tensor] = []
        self.gradients: list[torch.Tensor] = []
        cross_entropy, attend_packed = F.cross_entropy, LowbitAttention.attend_packed

        def keep_losses(logits: torch.Tensor, labels: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
            losses.append(cross_entropy(logits.detach(), labels, reduction="none"))
            return cross_entropy(logits, labels, *args, **kwargs)

        def keep_gradients(module: LowbitAttention, *args: torch.Tensor, **kwargs: object) -> torch.Tensor:
            for x in args[:3]:
                if len(x) == SEQ_LEN:  # not the few tokens of the start-up check
                    x.register_hook(lambda grad: self.gradients.append(grad.clone()))
            return attend_packed(module, *args, **kwargs)

        # 0.2.x reads one token more than it trains on.
        text = [*documents[:-1], documents[-1] + "!"] if LINE == "0.2" else documents
        with patch.context() as patched:
            patched.setitem(DATASETS, "boundaries", DatasetConfig("", lambda path: Dataset.from_dict({"text": text * 2}),
                                                                  lambda sample: sample["text"]))
            patched.setattr(F, "cross_entropy", keep_losses)
            patched.setattr(LowbitAttention, "attend_packed", keep_gradients)
            run(out_dir, steps=1, seq_len=SEQ_LEN, checkpointing="none", dataset="boundaries", training__local_batch_size=1,
                options={"recipe": recipe, "deterministic": True})
        self.losses = torch.cat(losses)
        assert self.losses.shape == (SEQ_LEN,)
        assert len(self.gradients) == 3 * LAYERS


def _rows(document: int) -> torch.Tensor:
    rows = torch.zeros(SEQ_LEN, dtype=torch.bool)
    start = sum(LENGTHS[:document])
    rows[start:start + LENGTHS[document]] = True
    return rows


@pytest.mark.parametrize("recipe", [EXACT, "mxfp8"])
def test_a_document_changes_no_other_documents_loss_nor_gradients(recipe: str, tmp_path: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    documents = ["x" * (length - SPECIALS) for length in LENGTHS]
    before = Seen(tmp_path, documents, recipe, monkeypatch)
    for changed in (0, 2):
        others = [*documents]
        others[changed] = "Z" * len(documents[changed])
        after, rows = Seen(tmp_path, others, recipe, monkeypatch), _rows(changed)
        assert not torch.equal(before.losses[rows], after.losses[rows])
        assert torch.equal(before.losses[~rows], after.losses[~rows])
        for ours, theirs in zip(before.gradients, after.gradients, strict=True):
            assert not torch.equal(ours[rows], theirs[rows])
            assert torch.equal(ours[~rows], theirs[~rows])
            assert ours[~rows].any()
