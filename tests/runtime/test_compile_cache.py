"""Where compiled programs go, by setting and environment."""

from pathlib import Path

from jaxrl_hybrid.runtime import compile_cache


def test_auto_is_in_the_users_cache_directory(tmp_path):
  found = compile_cache.directory("auto", {"XDG_CACHE_HOME": str(tmp_path)})
  assert found.parent == tmp_path / "jaxrl_hybrid" / "compiled"
  at_home = compile_cache.directory("auto", {})
  assert at_home.is_relative_to(Path.home() / ".cache")


def test_jaxs_own_variable_goes_before_auto_but_not_before_a_directory(tmp_path):
  environ = {"JAX_COMPILATION_CACHE_DIR": "/elsewhere"}
  assert compile_cache.directory("auto", environ) is None
  assert compile_cache.directory(str(tmp_path), environ) == tmp_path


def test_off_keeps_nothing():
  assert compile_cache.directory("off", {}) is None


def test_other_processors_have_other_directories(tmp_path, monkeypatch):
  found = set()
  for flags in ("flags : sse avx", "flags : sse avx avx512f"):
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor : 0\n{flags}\n")
    monkeypatch.setattr(compile_cache, "CPU_INFO", info)
    found.add(compile_cache.directory("auto", {}))
  assert len(found) == 2


def test_a_directory_that_cannot_be_made_is_said_and_does_not_stop_a_run(
  tmp_path, caplog
):
  file = tmp_path / "file"
  file.write_text("")
  assert not compile_cache.is_writable(file / "cache")
  assert "set trainer.compile_cache" in caplog.text
  assert compile_cache.is_writable(tmp_path / "new" / "cache")
