# Finds the project's Python: sets `root` (this clone) and `python` (the one of its .venv), and makes .venv first when it
# is missing or not made from this clone's requirements. The other scripts source this file; `bash env.sh` only sets up.
# Silent and done in milliseconds when .venv is current: no Python is started to find that out.
#
# On a terminal set-up shows what it does and for how long; elsewhere it prints a line every 20 seconds.
# Python writes bytecode when it first imports a module, so a set-up compiles nothing: that took longer than all the rest,
# for six times as many files as a run imports. Where PYTHONDONTWRITEBYTECODE forbids that, all is compiled here.
#
# Setting up writes to .venv and .uv only: .uv holds the log, the lock, uv and its cache (where the machine has none).
# The new environment is built in .uv/new and moved to .venv when it is whole, so an interrupted set-up leaves no .venv.
# TORCH_BACKEND=cpu|cu…|auto picks another build of torch; later starts keep it until another one is asked for.
# DEEPLIGHTNING_PYTHON=python3 (a command or a path) uses that Python with the packages it has; then nothing is set up.

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
python=$root/.venv/bin/python
work=$root/.uv
log=$work/log

# What the environment in folder $1 has to be made from, one fact a line; its file `made-from` holds the same lines.
# The settings of ruff, mypy and pytest, from [tool.ruff] on, change nothing that is installed.
# The requirements include those of the plug-ins, which are installed in editable form, like the clone itself.
made_from() {
    printf '%s\n' "clone: $root" "python: $(readlink -f -- "$1/bin/python")" "torch: $torch" "requirements: $requirements"
}

is_current() {
    [ -x "$python" ] && [ -f "$root/.venv/made-from" ] && [ "$(<"$root/.venv/made-from")" = "$(made_from "$root/.venv")" ]
}

say() { printf '%s\n' "$@" >&2; }

# Begins a step of the set-up, `$1`, and shows how it goes. A process of its own does that until file 8 is closed, which
# the end of this shell does too.
begin() {
    finish
    step=$1 since=$SECONDS from=$(grep -c '' "$log")
    exec 8> >(show_progress)
    progress=$!
}

# Ends the step: a terminal keeps a line with its seconds.
finish() {
    [ -n "$progress" ] || return 0
    exec 8>&-
    wait "$progress" 2>/dev/null
    progress=
    [ -z "$columns" ] || printf '\r\033[K  %-22s %4d s\n' "$step" $((SECONDS - since)) >&2
}

show_progress() {
    local turn=0 frames='-\|/' line asked
    exec 9>&-
    trap '' INT
    while :; do
        if [ -n "$columns" ]; then
            line="${frames:turn++ % 4:1} $(printf '%-22s %4d s' "$step" $((SECONDS - since)))  $(what_uv_does)"
            printf '\r\033[K%s' "${line:0:columns - 1}" >&2
        elif ((turn++)); then
            say "  $step: $((SECONDS - since)) s  $(what_uv_does)"
        fi
        asked=$SECONDS
        read -r -t "$pause"
        [ $? -gt 128 ] || ((SECONDS - asked >= pause)) || return 0 # no time-out (1 in bash 3.2): file 8 is closed
    done
}

# What uv or pip has begun in this step and not ended, by the log: the three largest files.
what_uv_does() {
    awk -v from="$from" '
        NR <= from { next }
        $1 == "Downloading" || $1 == "Building" {
            verb[$2] = tolower($1)
            size[$2] = NF > 2 ? " " $3 $4 : ""
            weight[$2] = substr($3, 2) * ($3 $4 ~ /G/ ? 1000 : $3 $4 ~ /M/ ? 1 : 0)
        }
        $1 == "Downloaded" || $1 == "Built" { delete verb[$2] }
        $1 ~ /^(Resolved|Prepared|Installed|Successfully)$/ {
            stage = tolower($1) " " $2 " " $3
            for (name in verb) delete verb[name]
        }
        END {
            for (shown = 0; shown < 3; shown++) {
                best = ""
                for (name in verb) if (best == "" || weight[name] > weight[best]) best = name
                if (best == "") break
                text = text (text ? ", " : "") (verb[best] == last ? "" : verb[best] " ") best size[best]
                last = verb[best]
                delete verb[best]
            }
            for (name in verb) more++
            print text ? text (more ? " and " more " more" : "") : stage
        }' "$log" 2>/dev/null
}

# A note about what stopped the set-up; the lines of $log follow where there are any.
stop() {
    finish
    say "Cannot set up the environment of $root: $1"
    if [ -s "$log" ]; then
        tail -n 8 -- "$log" | sed 's/^/    /' >&2
        say "Everything that was said: $log"
    fi
    return 3
}

# Runs a command with its words in the log, in the background, so that Ctrl-C and kill end it at once.
quietly() {
    env -u UV_TORCH_BACKEND -u UV_REQUIRE_HASHES -u UV_SYSTEM_PYTHON -u PIP_USER -u PIP_TARGET -u PIP_PREFIX -u PYTHONHOME \
        "$@" >>"$log" 2>&1 </dev/null 8>&- &
    wait "$!"
}

# Ends the set-up and the script that asked for it, with the exit code of a process that was interrupted.
interrupted() {
    kill "$!" 2>/dev/null  # a trap may run before the next command, such as `child=$!`
    wait "$!" 2>/dev/null
    finish
    [ -z "$building" ] || rm -rf -- "$new"
    say "Interrupted; the next start sets up again."
    exit "$1"
}

find_python() {
    for base in python3 python3.11 python3.12 python3.13 python3.14 python; do
        base=$("$base" -c 'import os, sys; print(os.path.realpath(sys.executable)); sys.exit(sys.version_info < (3, 11))' \
            2>/dev/null) && return
    done
    stop "Python 3.11 or newer is needed, and neither python3 nor python3.11 to python3.14 on the PATH is one. Install it,
for example with your system's package manager, and start again."
}

# The uv on the PATH or one that an earlier set-up left, else the one of requirements.lock, from the package index into .uv.
find_uv() {
    for uv in "$(command -v uv)" "$root/.venv/bin/uv" "$work/uv/bin/uv"; do
        case "$("$uv" --version 2>/dev/null)" in
            "uv 0."[0-8].* | "") ;; # too old, or none
            *) return ;;
        esac
    done
    quietly "$base" -m venv --clear "$work/uv" &&
        awk '/^[^ ]/ { on = /^uv==/ } on' "$root/requirements.lock" >"$work/uv/lock" &&
        quietly "$work/uv/bin/python" -m pip install --no-cache-dir --retries 2 --require-hashes -r "$work/uv/lock" &&
        uv=$work/uv/bin/uv
}

# Everything of requirements.lock, each file checked against its hash. Another build of torch has other hashes and needs
# other packages: then the lock gives the versions only.
install_packages() {
    local into=(pip install --python "$new/bin/python") editable=(-e .) plugin
    for plugin in "${plugins[@]}"; do editable+=(-e "${plugin%/*}"); done
    [ -z "${PYTHONDONTWRITEBYTECODE-}" ] || into+=(--compile-bytecode)
    if [ "$torch" = index ]; then
        quietly "$uv" --directory "$root" "${into[@]}" --require-hashes -r requirements.lock
    else
        quietly "$uv" --directory "$root" "${into[@]}" --torch-backend "$torch" --no-verify-hashes \
            -c requirements.lock -r pyproject.toml --extra dev
    fi && quietly "$uv" --directory "$root" "${into[@]}" --offline --no-deps --no-build-isolation "${editable[@]}" &&
        { [ -z "${PYTHONDONTWRITEBYTECODE-}" ] ||
            quietly "$new/bin/python" -m compileall -q "$root/deeplightning" "$root/serve" "${plugins[@]%/*}"; }
}

why_not() {
    if grep -qiE 'no space left|disk quota' "$log" || [ "$(df -Pk "$root" | awk 'END { print $4 }')" -lt 100000 ]; then
        stop "the disk is full. A set-up needs about 7 GB; free some, or clone to another disk, and start again."
    elif grep -q 'ensurepip' "$log"; then
        stop "$base cannot make virtual environments. Install its venv package (Debian: python3-venv) or uv, and start again."
    elif grep -q "invalid value '$torch'" "$log"; then
        stop "TORCH_BACKEND=$torch is none of the builds of torch that uv knows:"
    elif grep -qiE 'hash(es)? (do not match|mismatch)|mismatched hash' "$log"; then
        stop "a package is not the one that requirements.lock names, so nothing was installed. If you did not change the
package index on purpose, do not go on."
    else
        stop "a package could not be installed. Most often there is no network, or the package index cannot be reached
(HTTPS_PROXY, UV_DEFAULT_INDEX, PIP_INDEX_URL and TORCH_BACKEND are obeyed)."
    fi
}

set_up() {
    local new=$work/new building='' base='' uv='' code=0 started=$SECONDS
    local step='' since=0 from=0 progress='' columns='' pause=${SETUP_REPORT_SECONDS:-20} # tests are less patient
    if [ -t 2 ] && [ "${TERM:-dumb}" != dumb ]; then
        columns=$(stty size <&2 2>/dev/null | sed 's/.* //')
        [ "${columns:-0}" -gt 0 ] || columns=80 # it does not know its size
        pause=1
    fi
    case "$torch" in
        index | cpu | auto | cu[0-9]* | rocm[0-9]* | xpu) ;;
        *) log='' stop "TORCH_BACKEND=$torch is not known. It can be cpu, auto, or a CUDA release such as cu128; unset, the
package index's own build is taken." || return ;;
    esac
    mkdir -p -- "$work" 2>/dev/null && : 2>/dev/null 9>"$work/lock" ||
        { log='' stop "nothing can be written there. Make the folder writable, or clone to one that is."; return; }
    find_python || return
    # The lock belongs to this shell's file 9; the kernel drops it when the shell ends, however that happens.
    exec 9>"$work/lock"
    trap 'interrupted 130' INT
    trap 'interrupted 143' TERM
    trap 'interrupted 129' HUP
    "$base" -c 'import fcntl, sys
try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("Another start is setting up the environment; waiting for it.", file=sys.stderr, flush=True)
    fcntl.flock(9, fcntl.LOCK_EX)' &
    wait "$!"
    is_current || { building=yes; build; } || { code=$?; rm -rf -- "$new"; }
    trap - INT TERM HUP
    exec 9>&-
    return "$code"
}

build() {
    : 2>/dev/null >"$log"
    say "Setting up the environment, once: one to a few minutes, at most 3.5 GB" \
        "to download, 7 GB on disk in $root/.venv"
    if [ "$torch" = index ] && [[ $OSTYPE == linux* ]] && ! has_nvidia; then
        say "No NVIDIA GPU was found. TORCH_BACKEND=cpu bash env.sh takes the CPU build of" \
            "PyTorch's own index: less than half of both, without the hashes of the lock."
    fi
    # What pip is told about the index holds for uv too, which does not read it.
    [ -z "${PIP_INDEX_URL-}" ] || local -x UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$PIP_INDEX_URL}
    local cache=${UV_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/uv}
    [ -n "${UV_CACHE_DIR-}" ] || [ -w "$cache" ] || cache=$work/cache
    local -x UV_CACHE_DIR=$cache
    begin "1/3 uv, environment"
    rm -rf -- "$new" "$work/old"
    find_uv && quietly "$uv" venv --clear --relocatable --prompt deeplightning --python "$base" "$new" &&
        begin "2/3 packages" && install_packages || { why_not; return; }
    begin "3/3 check of torch"
    quietly env -u PYTHONDONTWRITEBYTECODE "$new/bin/python" -c 'import torchvision' || { torch_mismatch; return; }
    finish
    made_from "$new" >"$new/made-from" || { why_not; return; }
    [ ! -e "$root/.venv" ] || mv -- "$root/.venv" "$work/old"
    mv -- "$new" "$root/.venv" || { why_not; return; }
    rm -rf -- "$work/old" "$work/uv"
    say "The environment is ready after $((SECONDS - started)) s."
}

has_nvidia() { [ -e /proc/driver/nvidia ] || [ -e /dev/dxg ] || command -v nvidia-smi >/dev/null; }

torch_mismatch() {
    if grep -q 'torchvision::nms does not exist' "$log"; then
        stop "torch and torchvision come from different builds and do not work together. Take both from one place: unset
UV_FIND_LINKS and other settings that offer a torch of their own, or set TORCH_BACKEND=cpu; then start again."
    else
        stop "torchvision was installed and cannot be imported."
    fi
}

# A Python that has the packages, made absolute, since the scripts change the working directory.
own_python() {
    python=$(command -v -- "$DEEPLIGHTNING_PYTHON") || {
        log='' stop "DEEPLIGHTNING_PYTHON=$DEEPLIGHTNING_PYTHON is no command that is here. Name a Python that has the
packages, such as python3, or unset the variable to set up .venv."
        return
    }
    case "$python" in /*) ;; *) python=$PWD/$python ;; esac
    export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
}

if [ -n "${DEEPLIGHTNING_PYTHON-}" ]; then
    own_python
    code=$?
    return "$code" 2>/dev/null || exit "$code" # `exit` where the file is not sourced
fi
plugins=("$root"/plugins/*/pyproject.toml)
[ -e "${plugins[0]}" ] || plugins=()
requirements=$(cd -- "$root" && sed '/^\[tool\.ruff\]/,$d' pyproject.toml | cat - requirements.lock "${plugins[@]}" | cksum)
torch=index
while read -r fact value; do
    [ "$fact" != torch: ] || torch=$value
done 2>/dev/null <"$root/.venv/made-from"
torch=${TORCH_BACKEND:-$torch}

is_current || set_up
