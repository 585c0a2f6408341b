"""What the documents say is what the code does."""

import re
from pathlib import Path

import torch

import cp_mesh
from cp_mesh.explain import kernel_table

ROOT = Path(__file__).resolve().parent.parent


def test_kernel_table_is_that_of_the_code() -> None:
    assert kernel_table() in (ROOT / "docs" / "kernels.md").read_text()


def test_links_and_names_in_the_documents_exist() -> None:
    for document in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        text = document.read_text()
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
        for name in re.findall(r"`(?:cp_mesh|tests|examples|docs)/[\w./]+\.(?:py|md|csv)`", text):
            assert (ROOT / name.strip("`")).exists(), f"{document.name} names {name}"
        for name in re.findall(r"`cp_mesh\.(\w+)", text):
            assert hasattr(cp_mesh, name), f"{document.name} names cp_mesh.{name}"


def test_explain_shows_owners_work_and_traffic() -> None:
    text = cp_mesh.explain(96, 3, layout=cp_mesh.Contiguous(), mask=cp_mesh.Mask(window=(4, 0)), columns=6)
    assert "owner 001122" in text
    assert text.count("receives 4 key rows") == 2  # the halo of ranks 1 and 2; rank 0 needs nobody
    assert "kernel auto = reference" in text
    causal = cp_mesh.explain(96, 3, layout=cp_mesh.Contiguous())
    shares = [float(share) for share in re.findall(r"work ([\d.]+)", causal)]
    assert shares == sorted(shares) and shares[2] > 1.5 > 1.0 > shares[0]
    assert abs(sum(shares) - 3) < 0.02


def test_explain_tells_the_extra_memory() -> None:
    settings = {"device": "cuda", "dtype": torch.bfloat16, "num_heads": 32, "compute_capability": (9, 0)}
    grouped = cp_mesh.explain(131072, 8, num_kv_heads=8, **settings)
    peaks = [float(peak) for peak in re.findall(r"extra memory ([\d.]+) GiB \(0.5 symmetric\)", grouped)]
    assert len(peaks) == 8 and max(peaks) == 2.12  # as docs/performance.md says
    assert "(0.5 symmetric) in 4 head chunks" in cp_mesh.explain(131072, 8, **settings)
    assert "(0.25 symmetric) in 8 head chunks" in cp_mesh.explain(131072, 8, head_chunks=8, **settings)
    assert "(0 symmetric)" in cp_mesh.explain(96, 3, num_heads=2)


def test_explain_takes_options_of_scores() -> None:
    on_gpu = {"device": "cuda", "dtype": torch.bfloat16, "compute_capability": (9, 0)}
    assert "kernel auto = cudnn" in cp_mesh.explain(96, 3, scores=["sinks"], **on_gpu)
    assert "kernel auto = cudnn" not in cp_mesh.explain(96, 3, scores={"softcap": 30.0}, **on_gpu)
    assert "kernel auto = reference" in cp_mesh.explain(96, 3, scores=["softcap", "sinks"])
