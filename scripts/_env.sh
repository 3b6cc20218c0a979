# Sourced by scripts/demo and scripts/test: makes the checkout's .venv, or finds it up to date, and leaves its Python in $PY.
# Knows pip, uv and what mlxspec runs on; does not know what its callers do. Not to be run by itself.

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
VENV="$ROOT/.venv"
PY="$VENV/bin/python"

say() { printf '%s\n' "$*" >&2; }
die() {
    say "$*"
    exit 1
}

# Refuse in one sentence what MLX has no wheels for.
check_machine() {
    local os arch libc
    os=$(uname -s)
    arch=$(uname -m)
    case "$os/$arch" in
    Darwin/arm64) return ;;
    Linux/x86_64 | Linux/aarch64) ;;
    *) die "mlxspec runs on Apple Silicon Macs and on Linux (x86-64, arm64), not on $os $arch: MLX has no package for it." ;;
    esac
    libc=$(getconf GNU_LIBC_VERSION 2>/dev/null | sed -n 's/^glibc //p') || true
    [ -n "$libc" ] || die "mlxspec needs a Linux with glibc 2.35 or newer (Ubuntu 22.04, Debian 12), and this one has another C library."
    [ "$(printf '2.35\n%s\n' "$libc" | sort -V | head -n 1)" = 2.35 ] ||
        die "mlxspec needs glibc 2.35 or newer (Ubuntu 22.04, Debian 12), and this system has $libc: MLX has no package for it."
}

python_fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2])' >/dev/null 2>&1 </dev/null; }

# The first Python >= 3.11 among python3 and its numbered names; empty if there is none.
find_python() {
    local name
    for name in python3 python3.13 python3.12 python3.11 python3.14 python; do
        if command -v "$name" >/dev/null 2>&1 && python_fits "$name"; then
            command -v "$name"
            return
        fi
    done
}

# make_env EXTRA: installs the checkout into .venv, with the extra `dev` if asked for. A stamp of what was installed makes the next
# call a matter of milliseconds; an environment with the extra serves callers without it too.
make_env() {
    local extra=${1:-} base stamp spec="$ROOT"
    check_machine
    stamp=$(cksum <"$ROOT/pyproject.toml" | tr ' ' '-')
    if [ -x "$PY" ] && python_fits "$PY"; then
        case "$(cat "$VENV/.mlxspec-stamp" 2>/dev/null)" in
        "$stamp $ROOT $extra" | "$stamp $ROOT dev") return ;;
        esac
    fi
    base=$(find_python)
    [ -n "$extra" ] && spec="$ROOT[$extra]"
    if command -v uv >/dev/null 2>&1; then
        say "Making the environment .venv with uv (the first time it downloads about 150 MB)."
        uv venv --quiet --allow-existing --python "${base:->=3.11}" "$VENV" </dev/null || die "uv could not make the environment."
        uv pip install --python "$PY" -e "$spec" >&2 </dev/null || die "uv could not install mlxspec's dependencies; see above."
    else
        [ -n "$base" ] || die "mlxspec needs Python 3.11 or newer, and none was found (looked for python3 and python3.11 to python3.14)."
        "$base" -c 'import ensurepip, venv' >/dev/null 2>&1 ||
            die "This Python cannot make environments; on Debian and Ubuntu: sudo apt install python3-venv"
        say "Making the environment .venv with $("$base" -V) and pip (the first time it downloads about 150 MB)."
        "$base" -m venv "$VENV" </dev/null || die "Python could not make the environment."
        "$PY" -m pip install --disable-pip-version-check -e "$spec" >&2 </dev/null ||
            die "pip could not install mlxspec's dependencies; see above."
    fi
    printf '%s\n' "$stamp $ROOT $extra" >"$VENV/.mlxspec-stamp"
}
