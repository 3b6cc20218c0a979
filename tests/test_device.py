"""The device layer, mostly in child processes: which BLAS is loaded can be chosen once in a process.

Every child gets a cache, home and temporary folder of its own, so that no run here depends on an earlier one.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from planting import catches, rewritten

from mlxspec.platform import bundled_blas, compile_folder, device, folders

ROOT = Path(__file__).resolve().parent.parent
linux_only = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="Linux chooses its BLAS; macOS has Accelerate"
)
needs_compiler = pytest.mark.skipif(
    compile_folder.compiler() is None, reason="needs g++, with which MLX compiles for the CPU"
)

REPORT = """
from mlxspec.platform import device
import sys
assert "mlx.core" not in sys.modules
import mlx.core as mx
a = mx.arange(4096, dtype=mx.float32).reshape(64, 64) / 4096
assert abs((a @ a).sum().item() - (a.sum(0) * a.sum(1)).sum().item()) < 1e-1
device.compile_kernels()
r = device.report()
print(r.blas_kind, r.threads, r.compile_enabled, r.blas_path, *r.notices, sep="\\n")
"""
COMPILE = """
from mlxspec.platform import device
import os, tempfile
import mlx.core as mx
is_first = device.compile_kernels()
before = dict(os.environ), tempfile.gettempdir()
with device.private_kernels():
    print(mx.compile(lambda x: mx.sin(x) * x - 2.5)(mx.ones(3)).tolist()[0])
assert before == (dict(os.environ), tempfile.gettempdir())
print(device.report().kernel_folder, device.compile_enabled())
"""

TF32 = """
import os, sys
if sys.argv[1:] == ["late"]:
    import mlx.core
import mlxspec.platform.device as device
print(os.environ["MLX_ENABLE_TF32"], device.tf32(), device.report().tf32)
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run Python source in a process with an empty home, temporary folder and cache; keyword arguments set variables."""
    for name in ("home", "tmp"):
        (tmp_path / name).mkdir()

    def child(source: str, check: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
        kept = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("MLX", "OPENBLAS", "OMP_", "XDG_", "LD_"))
        }
        env = (
            kept
            | {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": str(ROOT)}
            | variables
        )
        done = subprocess.run(
            [sys.executable, "-c", source], env=env, capture_output=True, text=True, timeout=300
        )
        assert not check or done.returncode == 0, done.stderr
        return done

    return child


def test_float32_products_stay_float32(run: Run) -> None:
    """MLX reads MLX_ENABLE_TF32 once, so it is set before MLX comes in. A user's own value wins."""
    assert run(TF32).stdout.split() == ["0", "False", "False"]
    assert run(TF32, MLX_ENABLE_TF32="1").stdout.split() == ["1", "True", "True"]
    late = run("import sys; sys.argv.append('late')\n" + TF32)
    assert late.stdout.split() == ["0", "None", "None"]
    late = run("import sys; sys.argv.append('late')\n" + TF32, MLX_ENABLE_TF32="0")
    assert late.stdout.split() == ["0", "False", "False"]


def test_a_mac_is_told_of_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "backend", lambda: "metal")
    for value, came_first, words in (
        ("0", False, ""),
        ("1", False, "MLX_ENABLE_TF32 is set"),
        ("0", True, "imported before"),
    ):
        monkeypatch.setenv("MLX_ENABLE_TF32", value)
        monkeypatch.setattr(device, "_mlx_came_first", came_first)
        said = device._tf32_notices()
        assert [words in s for s in said] == [True] * bool(words)


@pytest.fixture(scope="session")
def real_blas() -> Path:
    """A library with plain cblas names, to play the system's or the user's."""
    try:
        return bundled_blas.prepare()[0]
    except bundled_blas.UnavailableError as error:
        pytest.skip(f"needs the bundled OpenBLAS: {error}")


def test_importing_the_package_is_light(run: Run) -> None:
    source = "import sys, mlxspec; print(mlxspec.__version__, [m for m in ('mlx.core', 'numpy', 'ctypes') if m in sys.modules])"
    assert run(source).stdout.strip() == "0.1.0 []"


def test_report_is_complete() -> None:
    report = device.report()
    assert report.backend in ("cpu", "metal", "cuda")
    assert report.device
    assert report.blas
    assert report.threads >= 1
    assert all(notice.endswith(".") for notice in report.notices)


def test_threads_follow_the_phase() -> None:
    device.prefill_threads()
    most = device.report().threads
    device.decode_threads()
    assert device.report().threads == 1
    device.decode_threads()
    device.prefill_threads()
    assert device.report().threads == most


@linux_only
class TestBlas:
    def test_auto_is_fast_and_says_nothing(self, run: Run, tmp_path: Path) -> None:
        kind, _, _, path, *notices = run(REPORT).stdout.splitlines()
        assert kind in ("system", "bundled")
        assert notices == []
        if kind == "bundled":
            assert Path(path).is_relative_to(tmp_path / "home" / ".cache" / "mlxspec" / "blas")

    def test_mlx_binds_to_the_chosen_library(self, run: Run, tmp_path: Path) -> None:
        """The loader's own account: which file answered when libmlx.so asked for cblas_sgemm."""
        path = run(REPORT, MLXSPEC_BLAS="bundled").stdout.splitlines()[3]
        run(
            REPORT,
            MLXSPEC_BLAS="bundled",
            LD_DEBUG="bindings",
            LD_DEBUG_OUTPUT=str(tmp_path / "bound"),
            LD_BIND_NOW="1",
        )
        text = "".join(p.read_text(errors="replace") for p in tmp_path.glob("bound.*"))
        bound = [
            line
            for line in text.splitlines()
            if "/libmlx.so" in line.split(" to ")[0] and "`cblas_sgemm'" in line
        ]
        assert bound
        assert all(path in line for line in bound)

    def test_wheel_loads_nothing(self, run: Run, tmp_path: Path) -> None:
        assert run(REPORT, MLXSPEC_BLAS="wheel").stdout.splitlines()[:2] == ["wheel", "1"]
        assert not (tmp_path / "home" / ".cache" / "mlxspec" / "blas").exists()

    def test_path(self, run: Run, real_blas: Path) -> None:
        lines = run(REPORT, MLXSPEC_BLAS=str(real_blas)).stdout.splitlines()
        assert lines[0] == "path"
        assert lines[3] == str(real_blas)

    @pytest.mark.parametrize("name", ["libopenblas.so.0", "libopenblasp.so.0"])
    def test_system_comes_first(self, run: Run, real_blas: Path, tmp_path: Path, name: str) -> None:
        (tmp_path / name).symlink_to(real_blas)
        for wish in ("", "system"):
            lines = run(REPORT, LD_LIBRARY_PATH=str(tmp_path), MLXSPEC_BLAS=wish).stdout.splitlines()
            assert lines[0] == "system"
            assert lines[3] == name

    def test_unfit_system_library_is_passed_over_and_named(self, run: Run, tmp_path: Path) -> None:
        libm = next(
            Path(folder, "libm.so.6") for folder in library_folders() if Path(folder, "libm.so.6").exists()
        )
        for name in ("libopenblas.so.0", "libopenblasp.so.0", "libopenblas.so"):
            shutil.copy(libm, tmp_path / name)
        kind, *_, last = run(REPORT, LD_LIBRARY_PATH=str(tmp_path)).stdout.splitlines()
        assert kind == "bundled"
        assert "passed over" in last

    def test_preloaded_is_recognised(self, run: Run, real_blas: Path) -> None:
        lines = run(REPORT, LD_PRELOAD=str(real_blas)).stdout.splitlines()
        assert lines[0] == "preloaded"
        assert lines[3] == str(real_blas)
        refused = run(REPORT, check=False, LD_PRELOAD=str(real_blas), MLXSPEC_BLAS="wheel")
        assert "loaded globally already" in refused.stderr

    @pytest.mark.parametrize(
        ("wish", "sentence"),
        [
            ("fast", "MLXSPEC_BLAS must be auto, system, bundled, wheel or the path"),
            ("./none.so", "cannot be used: "),
            ("/", "cannot be used: "),
        ],
    )
    def test_what_cannot_be_honoured_is_one_sentence(self, run: Run, wish: str, sentence: str) -> None:
        last = run("import mlxspec.platform.device", check=False, MLXSPEC_BLAS=wish).stderr.splitlines()[-1]
        assert last.startswith("mlxspec.errors.ConfigError: ")
        assert sentence in last

    def test_too_late_is_said(self, run: Run) -> None:
        source = "import mlx.core\nfrom mlxspec.platform import device\nr = device.report()\nprint(r.blas_kind, *r.notices)"
        said = run(source).stdout
        assert said.startswith("wheel mlx.core was imported before mlxspec")
        refused = run(source, check=False, MLXSPEC_BLAS="bundled").stderr.splitlines()[-1]
        assert "came too late" in refused

    def test_missing_packages_leave_the_wheels_blas_with_a_notice(self, run: Run) -> None:
        source = "from mlxspec.platform import bundled_blas\ndef gone():\n    raise bundled_blas.UnavailableError('it is gone.')\n"
        source += "bundled_blas._source = gone\n"
        kind, *_, notice = run(source + REPORT, LD_LIBRARY_PATH="").stdout.splitlines()
        if kind != "system":
            assert kind == "wheel"
            assert notice.endswith("because it is gone.")


def library_folders() -> list[str]:
    """Folders from which this process has loaded libraries."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({os.path.dirname(line.split(None, 5)[5]) for line in lines if ".so" in line})


@linux_only
class TestBundledCopy:
    @pytest.fixture(autouse=True)
    def _own_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, real_blas: Path) -> None:
        monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path / "cache"))

    def test_made_once_and_private(self) -> None:
        path, notice = bundled_blas.prepare()
        made = path.stat().st_mtime_ns
        assert notice is None
        assert bundled_blas.prepare()[0].stat().st_mtime_ns == made
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert [p.name for p in path.parent.iterdir()] == [path.name]

    @pytest.mark.parametrize("damage", ["cut", "empty"])
    def test_damaged_copy_is_made_again(self, damage: str) -> None:
        path, _ = bundled_blas.prepare()
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.truncate(size // 2 if damage == "cut" else 0)
        again, _ = bundled_blas.prepare()
        assert again.stat().st_size == size

    def test_copy_that_does_not_load_is_made_again(self, run: Run) -> None:
        cache = os.environ["MLXSPEC_CACHE"]
        path, _ = bundled_blas.prepare()
        path.write_bytes(b"\x7fNOT" + bytes(path.stat().st_size - 4))
        assert run(REPORT, MLXSPEC_CACHE=cache, MLXSPEC_BLAS="bundled").stdout.startswith("bundled\n")

    def test_several_first_runs_at_once(self) -> None:
        results: list[Path] = []
        threads = [
            threading.Thread(target=lambda: results.append(bundled_blas.prepare()[0])) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 3
        assert len(set(results)) == 1
        assert [p.name for p in results[0].parent.iterdir()] == [results[0].name]

    def test_failing_patchelf_is_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        fake = tmp_path / "patchelf"
        fake.write_text("#!/bin/sh\necho no such option >&2\nexit 3\n")
        fake.chmod(0o755)
        monkeypatch.setattr(bundled_blas, "_patchelf", lambda: str(fake))
        with pytest.raises(bundled_blas.UnavailableError, match=r"patchelf failed .*no such option"):
            bundled_blas.prepare()
        assert list((tmp_path / "cache" / "blas").iterdir()) == []

    def test_a_full_disk_is_told_with_its_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(handle: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", full)
        said = rf"prepared in {tmp_path}/cache/blas \(No space left on device\); make room for 30 MB there"
        with pytest.raises(bundled_blas.UnavailableError, match=said):
            bundled_blas.prepare()


class TestKernelFolder:
    @needs_compiler
    def test_private_kept_and_clean(self, run: Run, tmp_path: Path) -> None:
        first = run(COMPILE).stdout
        store = tmp_path / "home" / ".cache" / "mlxspec" / "kernels"
        assert str(store) in first
        assert list((tmp_path / "tmp").iterdir()) == [], "something was left in the shared temporary folder"
        assert [p.name for p in store.iterdir()] == ["mlx"], "the run's own folder was not removed"
        kept = {p: p.stat().st_mtime_ns for p in store.rglob("*.so")}
        assert len(kept) == 2  # the layer's own trial and ours
        assert not list(store.rglob("*.cpp"))
        assert run(COMPILE).stdout.splitlines()[0] == first.splitlines()[0]
        assert {p: p.stat().st_mtime_ns for p in store.rglob("*.so")} == kept

    @needs_compiler
    def test_nothing_is_compiled_unasked_until_it_was_asked_for(self, run: Run, tmp_path: Path) -> None:
        """The first answer on a fresh machine must not wait for g++; what it lacks is said."""
        unasked = COMPILE.replace("device.compile_kernels()", "0") + "print(*device.report().notices)"
        store = tmp_path / "home" / ".cache" / "mlxspec" / "kernels"
        first = run(unasked).stdout
        assert first.splitlines()[1] == "None False"
        assert "`mlxspec demo --all` has them compiled" in first
        assert not list(store.rglob("*.so"))
        run(COMPILE + "import os; os._exit(7)", check=False)  # did not come to its end
        assert run(unasked).stdout == first
        waits = COMPILE + "print('waits', is_first)"
        assert "waits True" in run(waits).stdout
        assert "waits False" in run(waits).stdout
        again = run(unasked).stdout
        assert again.splitlines()[1].endswith(" True")
        assert "by itself" not in again

    @needs_compiler
    def test_killed_process_hands_on_what_it_used_and_is_swept(self, run: Run, tmp_path: Path) -> None:
        assert run(COMPILE + "import os; os._exit(7)", check=False).returncode == 7
        store = tmp_path / "home" / ".cache" / "mlxspec" / "kernels"
        assert len(list(store.glob("mlx/*/cpu/*.so"))) == 2
        (left,) = store.glob("run-*")
        run(COMPILE)
        assert list(store.glob("run-*")) == [left]  # it may be another process's
        os.utime(left, (0, 0))
        run(COMPILE)
        assert list(store.glob("run-*")) == []

    @needs_compiler
    def test_broken_compiler_switches_compiling_off(self, run: Run, tmp_path: Path) -> None:
        fake = tmp_path / "bin"
        fake.mkdir()
        (fake / "g++").write_text('#!/bin/sh\ncase "$1" in --version) exit 0;; esac\nexit 1\n')
        (fake / "g++").chmod(0o755)
        value, state = run(COMPILE, PATH=f"{fake}{os.pathsep}{os.environ['PATH']}").stdout.splitlines()
        assert float(value) == pytest.approx(0.841471 - 2.5, abs=1e-5)
        assert state.endswith(" False")

    @linux_only
    def test_without_compiler_everything_works(self, run: Run, tmp_path: Path) -> None:
        tools = tmp_path / "bin"
        tools.mkdir()
        (tools / "sh").symlink_to(Path("/bin/sh").resolve())
        value, state = run(COMPILE, PATH=str(tools)).stdout.splitlines()
        assert float(value) == pytest.approx(0.841471 - 2.5, abs=1e-5)
        assert state == "None False"

    @needs_compiler
    def test_odd_cache_names(self, run: Run, tmp_path: Path) -> None:
        """Blanks are fine; a name the shell would read is not used for compiling."""
        assert " True" in run(COMPILE, MLXSPEC_CACHE=str(tmp_path / "a b")).stdout
        said = run(
            COMPILE + "print(device.report().notices[0])", MLXSPEC_CACHE=str(tmp_path / "a$(b)")
        ).stdout
        assert " True" in said
        assert "a character that the shell reads" in said

    def test_a_gpus_kernels_stay_where_mlx_keeps_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """CUDA's are kept from process to process; in a folder of its own each process would compile them anew."""
        monkeypatch.setattr(device, "backend", lambda: "cuda")
        monkeypatch.setattr(device, "_compiles_for_cpu", lambda: True)
        monkeypatch.setattr(device, "_compile_state", lambda: (True, ""))
        monkeypatch.setattr(device._kernels, "entered", lambda: pytest.fail("the folder was changed"))
        with device.private_kernels():
            pass

    def test_tmpdir_is_restored(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Seen through children that inherit the C environment."""
        monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path))
        folder = compile_folder.KernelFolder()

        def inherited() -> str:
            return subprocess.run(
                ["sh", "-c", 'echo "$TMPDIR"'], capture_output=True, text=True
            ).stdout.strip()

        os.unsetenv("TMPDIR")
        outside = os.environ.get("TMPDIR", "")
        with folder.entered():
            with folder.entered():
                assert inherited() == str(folder.path)
            assert inherited() == str(folder.path)
        assert inherited() == outside
        assert os.environ.get("TMPDIR", "") == outside


class TestFolders:
    def test_where(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.delenv("MLXSPEC_CACHE", raising=False)
        monkeypatch.setattr(sys, "platform", "darwin")
        assert folders.wanted_cache_folder() == tmp_path / "Library/Caches/mlxspec"
        monkeypatch.setattr(sys, "platform", "linux")
        assert folders.wanted_cache_folder() == tmp_path / ".cache/mlxspec"
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")
        assert folders.wanted_cache_folder() == tmp_path / ".cache/mlxspec"
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert folders.wanted_cache_folder() == tmp_path / "xdg/mlxspec"
        monkeypatch.setenv("MLXSPEC_CACHE", "~/own")
        assert folders.wanted_cache_folder() == tmp_path / "own"

    def test_open_folder_is_closed(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path / "cache"))
        (tmp_path / "cache" / "blas").mkdir(parents=True)
        (tmp_path / "cache" / "blas").chmod(0o777)
        folder, notice = folders.private_folder("blas")
        assert notice is None
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700

    @catches(
        "the group may go on writing",
        "mlxspec.platform.folders:make_private",
        rewritten("info.st_mode & 0o077", "info.st_mode & 0o007"),
        case="group",
    )
    @pytest.mark.parametrize("who", ["group", "others"])
    def test_nobody_else_may_do_anything(self, tmp_path: Path, who: str) -> None:
        for bits in (1, 2, 4):
            folder = tmp_path / str(bits)
            folder.mkdir()
            folder.chmod(0o700 | bits << (3 if who == "group" else 0))
            folders.make_private(folder)
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700

    def test_link_to_another_disk_is_followed(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "disk").mkdir()
        (tmp_path / "cache").symlink_to(tmp_path / "disk")
        monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path / "cache"))
        assert folders.private_folder("blas") == ((tmp_path / "disk" / "blas").resolve(), None)

    @pytest.mark.parametrize("obstacle", ["file", "owner", "nobody's home"])
    def test_unusable_folder_is_replaced_and_named(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, obstacle: str
    ) -> None:
        cache = tmp_path / "cache"
        if obstacle == "file":
            cache.write_text("")
        elif obstacle == "owner":
            monkeypatch.setattr(os, "geteuid", lambda: 12345)
        monkeypatch.setenv("MLXSPEC_CACHE", "~nobody-here/x" if obstacle == "nobody's home" else str(cache))
        folder, notice = folders.private_folder("blas")
        assert notice is not None
        assert notice.startswith("The cache folder ")
        assert not folder.is_relative_to(tmp_path)
        assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700


def test_the_main_thread_destroys_its_streams_at_exit() -> None:
    program = (
        "import mlxspec.platform.device, mlx.core as mx\n"
        "mx.eval(mx.ones(3) + 1)\n"
        "clear = mx.clear_streams\n"
        "mx.clear_streams = lambda: (clear(), print('cleared'))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "cleared\n"
