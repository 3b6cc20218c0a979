# Sourced by scripts/demo and scripts/test: makes the checkout's .venv, or finds it up to date, and leaves its Python in $PY.
# Knows pip, uv and what mlxspec runs on; does not know what its callers do. Works with the bash 3.2 of macOS.

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
    libc=$(getconf GNU_LIBC_VERSION 2>/dev/null | sed -n 's/^glibc //p')
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

# The first Python that fits among python3 and its numbered names; nothing if there is none.
find_python() {
    local name
    for name in python3 python3.13 python3.12 python3.14 python3.11 python; do
        if command -v "$name" >/dev/null 2>&1 && python_fits "$name"; then
            command -v "$name"
            return
        fi
    done
}

# Of all that pip says, the names and sizes of what it downloads; errors go to stderr by themselves.
show_downloads() {
    local line
    while IFS= read -r line; do
        case "$line" in
        *Downloading\ *) say "  ${line##*[ /]Downloading }" | sed 's|[^ ]*/||' ;;
        "Installing collected packages"*) say "  installing" ;;
        esac
    done
}

install_with_uv() {
    say "Making .venv with uv: the first time it downloads about 100 MB."
    uv venv --quiet "$1" --python "${2:->=3.11}" "$VENV" </dev/null || die "uv could not make .venv; see above."
    uv pip install --python "$PY" --editable "$3" >&2 </dev/null || die "uv could not install the dependencies; see above."
}

install_with_pip() {
    [ -n "$2" ] ||
        die "mlxspec needs Python 3.11 or newer, and none was found among python3 and python3.11 to python3.14."
    "$2" -c 'import ensurepip, venv' >/dev/null 2>&1 </dev/null ||
        die "$2 cannot make environments: install the package python3-venv (Debian, Ubuntu: sudo apt install python3-venv)."
    say "Making .venv with $("$2" -V): the first time it downloads about 100 MB."
    "$2" -m venv "$1" "$VENV" </dev/null || die "Python could not make .venv; see above."
    PIP_DISABLE_PIP_VERSION_CHECK=1 "$PY" -m pip install --progress-bar off --editable "$3" </dev/null | show_downloads ||
        die "pip could not install the dependencies; see above."
}

# make_env [EXTRA]: installs the checkout into .venv, with the extra `dev` if asked for. A stamp of what was installed makes
# the next call a matter of milliseconds; an environment with the extra serves those who need none.
make_env() {
    local extra=${1:-} spec=$ROOT stamp fresh=--upgrade installed
    check_machine
    stamp="$(cksum <"$ROOT/pyproject.toml") $ROOT"
    installed=$(cat "$STAMP" 2>/dev/null || true)
    if python_fits "$PY"; then
        case "$installed" in "$stamp $extra" | "$stamp dev") return ;; esac
        case "$installed" in *" dev") extra=dev ;; esac
    else
        fresh=--clear
    fi
    [ -z "$extra" ] || spec="$ROOT[$extra]"
    rm -f -- "$STAMP"
    if command -v uv >/dev/null 2>&1; then
        [ "$fresh" = --clear ] || fresh=--allow-existing
        install_with_uv "$fresh" "$(find_python)" "$spec"
    else
        install_with_pip "$fresh" "$(find_python)" "$spec"
    fi
    printf '%s\n' "$stamp $extra" >"$STAMP"
}
