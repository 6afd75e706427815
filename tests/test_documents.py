"""The code in README.md and in the guides: it runs, on a CPU, and commands have arguments that their programs take.

A block that cannot run on a CPU says so in the line in front of it: `<!-- not run: it needs two GPUs -->`. What the
text of a page takes for granted (tensors, a model) is in `tests/support/pages`, a file for each page that needs it.
"""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from magi_bench.cli import _parser

ROOT = Path(__file__).parents[1]
SUPPORT = Path(__file__).parent / "support" / "pages"
GUIDES = [
    "getting_started",
    "masks",
    "shared_prefixes",
    "draft_models",
    "images_in_text",
    "gpt_oss",
    "block_sparse",
    "lowering",
    "transformers",
    "trainer",
    "long_sequences",
    "varlen_attn",
    "magi_attention",
    "context_parallel",
    "troubleshooting",
    "gpus",
    "environment",
    "benchmark",
]
PAGES = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in GUIDES)]
BLOCK = re.compile(
    r"^(<!-- not run: (?P<reason>[^\n]+) -->\n)?^```(?P<language>\w+)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


FRAMEWORKS = {
    "transformers": ["transformers"],
    "shared_prefixes": ["transformers"],
    "images_in_text": ["transformers"],
    "gpt_oss": ["transformers"],
    "trainer": ["accelerate"],
}


class Block(NamedTuple):
    line: int
    language: str
    code: str
    is_run: bool


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(
            text.count("\n", 0, found.start("code")) + 1,
            found["language"],
            found["code"],
            found["reason"] is None,
        )
        for found in BLOCK.finditer(text)
    ]


def program_of(page: Path) -> str:
    """One program that runs the blocks of a page in order, as if they were written in the page."""
    support = SUPPORT / f"{page.stem.lower()}.py"
    lines = ["import sys", f"sys.path.insert(0, {str(ROOT)!r})", "names = {'__name__': 'page'}"]
    if support.exists():
        lines.append(
            f"exec(compile(open({str(support)!r}).read(), {str(support)!r}, 'exec'), names)"
        )
    for block in blocks_of(page):
        if block.language == "python" and block.is_run:
            code = "\n" * (block.line - 1) + block.code
            lines += [
                f"code = names.get('adapt', lambda text: text)({code!r})",
                f"exec(compile(code, {str(page)!r}, 'exec'), names)",
                f"names.get('check', lambda line, names: None)({block.line}, names)",
            ]
    return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_of_a_page(page, tmp_path):
    for framework in FRAMEWORKS.get(page.stem, []):
        pytest.importorskip(framework)
    environment = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    program = tmp_path / "page.py"
    program.write_text(program_of(page))
    run = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env={**os.environ, **environment},
    )
    assert run.returncode == 0, run.stderr[-3000:]


def test_every_page_has_code_that_runs():
    for page in PAGES:
        assert any(
            block.is_run and block.language in ("python", "bash") for block in blocks_of(page)
        ), page


COMMANDS = [
    (page, command)
    for page in sorted((ROOT / "docs").rglob("*.md")) + PAGES[:1]
    if page.parent.name != "log"
    for block in blocks_of(page)
    if block.language == "bash"
    for command in re.split(r"\n|&&", block.code.replace("\\\n", " "))
    if "magi-bench" in command
]


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=lambda x: getattr(x, "stem", x))
def test_arguments_of_magi_bench(page, command):
    command = re.sub(r"(\S*)\{([\w,]+)\}(\S*)", _expanded, command)
    _, *arguments = shlex.split(command, comments=True)
    _parser().parse_args(arguments)


def _expanded(found: re.Match) -> str:
    """Braces, as a shell expands them."""
    return " ".join(f"{found[1]}{name}{found[3]}" for name in found[2].split(","))


# Around the code of the README's table "You have, you write", which is in place of the {}.
ROWS = {
    "a Hugging Face model": """
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM._from_config(LlamaConfig(**sizes), {})
assert model(torch.arange(8)[None]).logits.isfinite().all()
""",
    "a `Trainer` or `SFTTrainer`, and sequences too long for one GPU": """
import os, tempfile
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="8", MASTER_ADDR="localhost", MASTER_PORT="0")
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)  # nobody else is there
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
arguments = TrainingArguments(tempfile.mkdtemp(), use_cpu=True)
trainer = Trainer(LlamaForCausalLM(LlamaConfig(**sizes)), arguments)
{}
assert isinstance(trainer, Trainer) and trainer.get_cp_size() == 8
assert trainer.model.config._attn_implementation == "magi"
""",
    "`varlen_attn`, `scaled_dot_product_attention`": """
from torch.nn.attention import activate_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn
{}
borders = torch.tensor([0, 8], dtype=torch.int32)
x = torch.randn(8, 2, 16)
assert varlen_attn(x, x, x, borders, borders, 8, 8).shape == x.shape
""",
    "prompts with many rollouts each": """
prompts, rollouts = [[1, 2, 3]], [[[4], [5, 6]]]
{}
assert packed.input_ids.tolist() == [[1, 2, 3, 4, 3, 5, 6]]
""",
    "a model that calls `flex_attention`": "model = torch.nn.Linear(2, 2); {}",
    "code that calls `torch.compile` for you": "{}",
    "eager code": "q = torch.randn(1, 2, 8, 16); {}",
    "packed tensors and a list of slices": """
q = k = v = torch.randn(8, 2, 16)
slices = magi_compile.AttnSlices.causal(8)
{}
""",
    "a program for MagiAttention": """
{}
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x = torch.randn(8, 2, 16)
key = magi_attn_flex_key([[0, 8]], [[0, 8]], "causal", 8, 8, 2, 2, 16, 0, dist.group.WORLD)
out, _ = calc_attn(*[dispatch(x, key)] * 3, key)
assert undispatch(out, key).shape == x.shape
""",
    "a sequence too long for one GPU": "{}",
}
NEEDED = {
    "a Hugging Face model": ["transformers"],
    "a `Trainer` or `SFTTrainer`, and sequences too long for one GPU": [
        "transformers",
        "accelerate",
    ],
}


# Runs each program of a list in a fork of a process that has imported what takes long to import.
IN_FORKS = """
import os, sys, traceback, torch
for name, program in eval(sys.argv[1]).items():
    if (child := os.fork()) == 0:
        try:
            exec(program, {"__name__": "__main__"})
        except BaseException:
            print(f"{name}: {traceback.format_exc()}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), sep=": ", flush=True)
"""


def test_rows_of_the_readme():
    """What a row says to write runs as it stands, after the import that the table names."""
    readme = (ROOT / "README.md").read_text()
    (first,) = re.findall("^After `(.+)`:\n\n\\| You have", readme, re.MULTILINE)
    chosen = {}
    for have, program in ROWS.items():
        needs = NEEDED.get(have, ())
        if not all(map(importlib.util.find_spec, needs)):
            continue
        (code,) = re.findall(rf"^\| {re.escape(have)} \| `(.+?)`", readme, re.MULTILINE)
        call = {"eager code": "(q, q, q)", "a sequence too long for one GPU": ""}.get(have)
        if call is not None:
            code = code.replace("(...)", call)
        chosen[have] = f"{first}\nimport torch\n" + program.replace("{}", code)
    command = [sys.executable, "-c", IN_FORKS, repr(chosen)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.stdout.splitlines() == [f"{have}: 0" for have in chosen], run.stderr[-3000:]


@pytest.mark.slow
def test_output_of_explain():
    """What the README shows of `explain` is what it prints, whatever documents this Python installation has."""
    (block,) = (b for b in blocks_of(ROOT / "README.md") if b.language == "console")
    command, expected = block.code.split("\n", 1)
    run = subprocess.run(
        [sys.executable, *command.removeprefix("$ python ").split()],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert run.returncode == 0, run.stderr
    slices = re.compile(r"slices +\d+ \(\d+ CAUSAL\)|area +[\d,]+ pairs, density [\d.]+")
    assert slices.sub("", run.stdout).strip() == slices.sub("", expected).strip()
