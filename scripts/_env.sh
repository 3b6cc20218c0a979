# Sourced by the scripts without a suffix: makes the checkout's .venv, or finds it up to date, and leaves its Python in $PY.
# Knows pip, uv and what mlxspec runs on; does not know what its callers do. Works with the bash 3.2 of macOS.

set -euo pipefail

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
VENV="$ROOT/.venv"
PY="$VENV/bin/python"
STAMP="$VENV/.mlxspec-stamp"

say() { printf '%s\n' "$*" >&2; }
die() {
    say "$*"
    exit 1
}

# Refuses in one sentence what MLX has no packages for.
check_machine() {
    local system libc
    system="$(uname -s) $(uname -m)"
    case "$system" in
    "Darwin arm64") return ;;
    "Linux x86_64" | "Linux aarch64") ;;
    *) die "mlxspec runs on Macs with Apple Silicon and on Linux (x86-64, arm64), not on $system: MLX has no package for it." ;;
    esac
    libc=$(getconf GNU_LIBC_VERSION 2>/dev/null | sed -n 's/^glibc //p' || true)
    [ -n "$libc" ] ||
        die "mlxspec needs a Linux with glibc 2.35 or newer (Ubuntu 22.04, Debian 12), and this one has another C library."
    [ "$(printf '2.35\n%s\n' "$libc" | sort -V | head -n 1)" = 2.35 ] ||
        die "mlxspec needs glibc 2.35 or newer (Ubuntu 22.04, Debian 12), and this system has $libc: MLX has no package for it."
}

# Whether $1 runs and is a Python >= 3.11 of this machine's own architecture (on a Mac it may be an Intel one).
python_fits() {
    "$1" -c 'import platform, sys; sys.exit(sys.version_info < (3, 11) or platform.machine() != sys.argv[1])' \
        "$(uname -m)" >/dev/null 2>&1 </dev/null
}

# Whether $1 is only a stand-in: on a Mac without Xcode's tools, /usr/bin/python3 opens a dialog that wants to install them.
opens_a_dialog() {
    [ "$1" = /usr/bin/python3 ] && [ "$(uname -s)" = Darwin ] && ! xcode-select -p >/dev/null 2>&1
}

# The first Python that fits among python3 and its numbered names; nothing if there is none.
find_python() {
    local name path
    for name in python3 python3.13 python3.12 python3.14 python3.11 python; do
        path=$(command -v "$name" 2>/dev/null) || continue
        if ! opens_a_dialog "$path" && python_fits "$path"; then
            printf '%s\n' "$path"
            return
        fi
    done
}

# Of all that pip says, the names and sizes of what it downloads; its errors go to stderr by themselves.
show_downloads() {
    local line
    while IFS= read -r line; do
        case "$line" in
        *Downloading\ *)
            line=${line#*Downloading }
            say "  ${line##*/}"
            ;;
        "Installing collected packages"*) say "  installing" ;;
        esac
    done
}

install_with_uv() {
    say "Making .venv with uv: the first time it downloads about 100 MB."
    python_fits "$PY" || uv venv --quiet --clear --python "$(uv_python)" "$VENV" </dev/null ||
        die "uv could not make .venv; see above."
    uv pip install --python "$PY" --editable "$1" >&2 </dev/null || die "uv could not install the dependencies; see above."
}

# What uv is to build on: a Python that is here, else one that it downloads itself.
uv_python() {
    local found
    found=$(find_python)
    printf '%s' "${found:->=3.11}"
}

install_with_pip() {
    local base
    if ! python_fits "$PY" || ! "$PY" -m pip --version >/dev/null 2>&1; then
        base=$(find_python)
        [ -n "$base" ] ||
            die "mlxspec needs Python 3.11 or newer for this machine's own architecture; here is only: $(
                found=$(command -v python3) && ! opens_a_dialog "$found" && "$found" -V 2>/dev/null || echo none
            )."
        "$base" -c 'import ensurepip, venv' >/dev/null 2>&1 </dev/null ||
            die "$base cannot make environments: install the package python3-venv (Debian, Ubuntu: sudo apt install python3-venv)."
        say "Making .venv with $("$base" -V): the first time it downloads about 100 MB."
        "$base" -m venv --clear "$VENV" </dev/null || die "Python could not make .venv; see above."
    else
        say "Bringing .venv up to date."
    fi
    PIP_DISABLE_PIP_VERSION_CHECK=1 "$PY" -m pip install --progress-bar off --editable "$1" </dev/null | show_downloads ||
        die "pip could not install the dependencies; see above."
}

# MLX's wheels for CPUs and for CUDA hold a file of the same name, and the one installed last counts.
install_cuda_last() {
    local wheel
    wheel="mlx-cuda-12==$("$PY" -c 'from importlib.metadata import version; print(version("mlx"))')"
    if command -v uv >/dev/null 2>&1; then
        uv pip install --python "$PY" --reinstall --no-deps "$wheel" >&2 </dev/null
    else
        "$PY" -m pip install --quiet --force-reinstall --no-deps "$wheel" </dev/null
    fi || die "MLX's wheel for CUDA could not be installed; see above."
}

# make_env [EXTRAS]: installs the checkout into .venv, with the extras `dev` or `dev,cuda` if asked for. A stamp of what was
# installed makes the next call a matter of milliseconds; an environment serves those who need less, and keeps what it has.
make_env() {
    local extra=${1:-} spec=$ROOT stamp
    check_machine
    stamp="$(cksum <"$ROOT/pyproject.toml") $ROOT"
    case "$(cat "$STAMP" 2>/dev/null || true)" in
    "$stamp $extra" | "$stamp dev,cuda") if python_fits "$PY"; then return; fi ;;
    "$stamp dev") if [ -z "$extra" ] && python_fits "$PY"; then return; fi ;;
    *" dev,cuda") extra=dev,cuda ;;
    *" dev") extra=${extra:-dev} ;;
    esac
    [ -z "$extra" ] || spec="$ROOT[$extra]"
    rm -f -- "$STAMP"
    if command -v uv >/dev/null 2>&1; then
        install_with_uv "$spec"
    else
        install_with_pip "$spec"
    fi
    case "$extra" in *cuda) install_cuda_last ;; esac
    printf '%s\n' "$stamp $extra" >"$STAMP"
}

# run_python NAME EXTRA [ARGUMENTS]: the Python file of this name in scripts/, from the checkout, in an environment with the extra.
run_python() {
    local name=$1 extra=$2
    shift 2
    make_env "$extra"
    cd -- "$ROOT"
    exec "$PY" "scripts/$name.py" "$@"
}
