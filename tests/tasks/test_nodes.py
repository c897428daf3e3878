"""Training on two nodes, simulated by two launchers in separate folders."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from deqseq.tasks import pretrain
from deqseq.tasks.common import command_line, processes
from deqseq.tasks.common.files import writing
from deqseq.tasks.pretraining import train

PROGRAM = str(Path(pretrain.__file__))
SETTINGS = {
    "model": {"vocab_size": 300, "backbone": {"name": "llama", "d_model": 16, "n_layer": 1, "n_head": 2}},
    "data": "data", "length": 16, "batch_tokens": 64, "per_device_batch_size": 1, "steps": 4, "passes": 99,
    "learning_rate": 1e-2,
    "eval_rows": 4, "eval_steps": 100, "save_steps": 2, "log_steps": 1, "spectral_every": 0, "workers": 0,
    "report_to": "none", "bf16": False,
}  # fmt: skip
DDP = str(Path(PROGRAM).parent / "pretraining" / "accelerate" / "ddp.yaml")


# Runs ``accelerate launch`` for one node in every folder, in forks of one process: the imports take seconds.
# With ``fork``, the nodes fork their processes too, instead of starting Python. Prints the exit statuses.
LAUNCH = """
import json, os, sys
from accelerate.commands import launch

program, config, port, folders, arguments, fork = map(json.loads, sys.argv[1:])
if fork:
    import deqseq.tasks.pretraining.train
    os.environ.update(PET_RUN_PATH="1", PET_START_METHOD="fork")
nodes = []
for number, folder in enumerate(folders):
    if child := os.fork():
        nodes.append(child)
        continue
    os.chdir(folder)
    with open("said.txt", "w") as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
    sys.argv = ["accelerate launch", "--config_file", config, "--num_machines", str(len(folders)),
                "--num_processes", str(len(folders)), "--machine_rank", str(number),
                "--main_process_ip", "127.0.0.1", "--main_process_port", str(port), program, *arguments]
    status = 1
    try:
        launch.main()
        status = 0
    except BaseException:
        import traceback
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)
print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(node, 0)[1]) for node in nodes]))
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def launch(folders: list[Path], *arguments: str, fork: bool = False) -> list[tuple[int, str]]:
    """Start one node, of one process, in every folder. Returns each node's exit status and output.

    ``fork``: the processes on the nodes are forks of the launcher too, not started as programs.
    """
    given = [PROGRAM, DDP, free_port(), [str(folder) for folder in folders], arguments, fork]
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR",
                   "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "CUDA_VISIBLE_DEVICES": ""}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, *map(json.dumps, given)],
        capture_output=True, text=True, timeout=150, env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = [(folder / "said.txt").read_text() for folder in folders]
    return list(zip(json.loads(done.stdout.splitlines()[-1]), said, strict=True))


def lines(said: list[tuple[int, str]]) -> list[str]:
    """The error lines that our program prints, without the lines of the launcher."""
    return [line for _, text in said for line in text.splitlines() if line.startswith("process ")]


@pytest.fixture
def nodes(tmp_path: Path, token_folder: Path) -> list[Path]:
    """The working directories of two nodes. Each has its own copy of the data and of the run file."""
    folders = [tmp_path / "node-0", tmp_path / "node-1"]
    for folder in folders:
        shutil.copytree(token_folder, folder / "data")
        (folder / "tiny.yaml").write_text(yaml.safe_dump(SETTINGS))
    return folders


def test_two_nodes_train_one_model(nodes: list[Path]) -> None:
    output = nodes[0].parent / "shared"
    said = launch(nodes, "tiny.yaml", "--output", str(output))
    assert [status for status, _ in said] == [0, 0], said
    assert json.loads((output / "training.json").read_text())["processes"] == 2
    assert "4 steps of 64 tokens on 2 x cpu" in said[0][1] + said[1][1]


def test_each_node_verifies_its_own_data(nodes: list[Path]) -> None:
    shard = next((nodes[1] / "data").glob("train-*.bin"))
    shard.write_bytes(bytes([shard.read_bytes()[0] ^ 1]) + shard.read_bytes()[1:])
    output = nodes[0].parent / "shared"
    said = launch(nodes, "tiny.yaml", "--output", str(output), fork=True)
    assert all(status for status, _ in said)
    (line,) = lines(said)
    assert line.startswith("process 1 on ") and f"{shard.name} is corrupted" in line
    assert all(f"{shard.name} is corrupted" in text for _, text in said)  # both nodes name the shard
    assert not output.exists()


def test_a_killed_rank_is_restarted(tmp_path: Path) -> None:
    """Kill a process of a run on two nodes. After the restart, the losses are as in a run without a kill."""
    script = str(Path(PROGRAM).parents[2] / "benchmarks" / "nodes.py")
    output = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, script, "--runs", "1", "--output", str(output)],
        capture_output=True, text=True, timeout=250, env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(output.read_text())["rows"]
    assert row["killed"] is not None and row["largest difference"] <= 1e-6


def test_a_lost_process_is_not_a_full_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(processes, "_several", lambda: True)
    with pytest.raises(RuntimeError, match="gloo"), writing(tmp_path):
        raise RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc] Read error")


@pytest.mark.parametrize("has_folder", [False, True])
def test_output_on_a_disk_of_the_node_is_refused(
    has_folder: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The nodes must share the output folder: every process must see the first process's file in it."""
    folder = tmp_path / "run"
    if has_folder:
        folder.mkdir()
    monkeypatch.setattr(train, "on_first", lambda _: folder / "file.part")
    monkeypatch.setattr(train, "_SHARED_FOLDER_TIMEOUT", 0)
    with pytest.raises(ValueError, match="all nodes must share it"):
        train._check_shared(folder)


def test_a_failure_is_in_the_report_of_torchrun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every process reports its error to torchrun, also a process that does not print the error."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("RANK", "1")

    def fail() -> None:
        raise ValueError("steps must be positive, got 0")

    assert command_line.main("x", "", {"fail": fail}, ["fail"], interrupted="") == 2
    failure = ProcessFailure(0, 1, 2, str(tmp_path / "error.json"))
    report = ChildFailedError("x", {0: failure}).format_msg()
    assert "error: steps must be positive, got 0" in report and "Traceback" not in report
