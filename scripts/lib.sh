# Shared by scripts/run and scripts/test. Source it.

export LC_ALL=C.UTF-8
repo_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
log_dir=$repo_root/build/logs
jobs=${CONCLAVE_JOBS:-$(nproc)}

if [[ -t 1 && -z ${NO_COLOR:-} ]]; then
  bold=$'\e[1m' red=$'\e[31m' green=$'\e[32m' plain=$'\e[0m'
else
  bold='' red='' green='' plain=''
fi

header() { printf '\n%s==> %s%s\n' "$bold" "$*" "$plain"; }
note() { printf '    %s\n' "$*"; }
die() {
  printf '%serror:%s %s\n' "$red" "$plain" "$*" >&2
  exit 1
}

# seconds_since START: elapsed seconds with one decimal; START is from $EPOCHREALTIME.
seconds_since() {
  local now=$EPOCHREALTIME
  awk -v a="$1" -v b="$now" 'BEGIN { printf "%.1f", b - a }'
}

# packages_in SECTION...: the packages listed under these sections of packages.txt.
packages_in() {
  local section
  for section in "$@"; do
    awk -v want="[$section]" '
      /^\[/ { inside = ($1 == want) }
      inside && /^[a-z0-9]/ { print $1 }' "$repo_root/scripts/packages.txt"
  done
}

# missing_packages PACKAGE...: those that are not installed.
missing_packages() {
  local package
  for package in "$@"; do
    [[ $(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null) == installed ]] ||
      printf '%s\n' "$package"
  done
}

# install_packages SECTION...: installs what is missing; does not touch the network otherwise.
install_packages() {
  local packages missing as_root=()
  mapfile -t packages < <(packages_in "$@")
  if ! command -v dpkg-query >/dev/null; then
    note "not a Debian system: assuming that these are installed: ${packages[*]}"
    return
  fi
  mapfile -t missing < <(missing_packages "${packages[@]}")
  if ((${#missing[@]} == 0)); then
    note "all ${#packages[@]} packages are installed"
    return
  fi
  if ((EUID != 0)); then
    command -v sudo >/dev/null ||
      die "missing packages, and neither root nor sudo to install them. As root, run:
    apt-get update && apt-get install --no-install-recommends ${missing[*]}"
    as_root=(sudo)
    [[ -t 0 ]] || as_root+=(-n)
    as_root+=(env)
  else
    as_root=(env)
  fi
  note "installing: ${missing[*]}"
  mkdir -p "$log_dir"
  local log=$log_dir/packages.log
  if ! "${as_root[@]}" apt-get -o Acquire::Retries=3 update >"$log" 2>&1 ||
    ! "${as_root[@]}" DEBIAN_FRONTEND=noninteractive apt-get -o Acquire::Retries=3 install -y \
      --no-install-recommends "${missing[@]}" >>"$log" 2>&1 </dev/null; then
    tail -n 15 "$log" >&2
    die "apt-get failed (log: ${log#"$repo_root"/}). Check the network and /etc/apt/sources.list,
    or install by hand: ${missing[*]}"
  fi
}

# cpu_seconds: processor time, user and system, of this shell and all its finished children.
cpu_seconds() {
  local stat
  stat=$(<"/proc/$$/stat")
  # Behind the name in parentheses the twelfth to fifteenth are utime, stime, cutime, cstime.
  awk -v hz="$(getconf CLK_TCK)" '{ printf "%.1f\n", ($12 + $13 + $14 + $15) / hz }' <<<"${stat##*) }"
}

# progress_of LINE SECONDS: how far a build or test run is, by a line of ninja, ctest or pytest, and
# about how long the rest takes at the same pace; other lines as they are.
progress_of() {
  local line=$1 seconds=$2 done=0 all=0 unit='' percent rest
  if [[ $line =~ ^\[([0-9]+)/([0-9]+)\] ]]; then
    unit=steps done=${BASH_REMATCH[1]} all=${BASH_REMATCH[2]}
  elif [[ $line =~ ^\ *([0-9]+)/([0-9]+)\ Test ]]; then
    unit=tests done=${BASH_REMATCH[1]} all=${BASH_REMATCH[2]}
  elif [[ $line =~ \[\ *([0-9]+)%\]$ ]]; then
    done=${BASH_REMATCH[1]} all=100
  fi
  if ((done == 0 || all == 0)); then
    cut -c 1-100 <<<"$line"
    return
  fi
  percent=$((done * 100 / all))
  rest=$((seconds * (all - done) / done))
  printf '%3d %%, %s%d s, about %d s left\n' "$percent" "${unit:+$done of $all $unit, }" "$seconds" "$rest"
}

# run_logged LOG COMMAND...: runs with all output in LOG; shows how far it is, on a terminal in one
# line that changes, elsewhere in a line every 15 seconds.
run_logged() {
  local log=$1 last='' line status=0 every=75 ticks=0 begun=$SECONDS
  shift
  mkdir -p "$(dirname "$log")"
  "$@" >"$log" 2>&1 </dev/null &
  local child=$!
  [[ ! -t 1 ]] || every=5
  while kill -0 "$child" 2>/dev/null; do
    sleep 0.2
    ((++ticks % every == 0)) || continue
    line=$(tail -n 1 "$log")
    [[ -n $line ]] || continue
    line=$(progress_of "$line" $((SECONDS - begun)))
    if [[ -t 1 ]]; then
      printf '\r\e[K    %s' "$line"
    elif [[ $line != "$last" ]]; then
      note "$line"
    fi
    last=$line
  done
  [[ ! -t 1 ]] || printf '\r\e[K'
  wait "$child" || status=$?
  return "$status"
}

# install_python: python3's virtual environment in build/python, with the packages of [pip]. It sees
# what is installed beside it: torch and transformers are taken from there where they are. CONCLAVE_PIP:
# more for pip to install.
install_python() {
  local folder=$repo_root/build/python log=$log_dir/python-packages.log packages more
  mapfile -t packages < <(packages_in pip)
  read -ra more <<<"${CONCLAVE_PIP:-}"
  packages+=("${more[@]}")
  export CONCLAVE_PYTHON=$folder/bin/python
  if [[ $(cat "$folder/installed.txt" 2>/dev/null) == "${packages[*]}" ]] && "$CONCLAVE_PYTHON" -c ''; then
    note "Python: ${folder#"$repo_root"/} has every package of PyPI"
    return
  fi
  note "installing from PyPI into build/python: ${packages[*]}"
  mkdir -p "$log_dir"
  rm -rf "$folder"
  if ! { python3 -m venv --system-site-packages "$folder" &&
    "$CONCLAVE_PYTHON" -m pip install --disable-pip-version-check "${packages[@]}"; } >"$log" 2>&1; then
    tail -n 15 "$log" >&2
    die "pip failed (log: ${log#"$repo_root"/}). Check the network, or leave the Python package out with
    --only for the other steps"
  fi
  echo "${packages[*]}" >"$folder/installed.txt"
}

has_cuda_driver() { [[ -e /dev/nvidiactl ]] || command -v nvidia-smi >/dev/null; }

# install_cuda_compiler: names an nvcc to CMake, from PATH or else from the wheels of
# cuda-wheels.txt in build/cuda-toolkit. CONCLAVE_CUDA=OFF: none.
install_cuda_compiler() {
  export CONCLAVE_CUDA=${CONCLAVE_CUDA:-AUTO}
  [[ $CONCLAVE_CUDA != OFF ]] || return 0
  if [[ -n ${CUDACXX:-} ]] || command -v nvcc >/dev/null; then
    note "CUDA compiler: ${CUDACXX:-$(command -v nvcc)}"
    return
  fi
  local folder=$repo_root/build/cuda-toolkit log=$log_dir/cuda-toolkit.log root
  local wanted=$repo_root/scripts/cuda-wheels.txt
  if ! cmp -s "$wanted" "$folder/installed.txt"; then
    note "no nvcc: installing the wheels of scripts/cuda-wheels.txt into build/cuda-toolkit"
    mkdir -p "$log_dir"
    rm -rf "$folder"
    if ! { python3 -m venv "$folder" &&
      "$folder/bin/pip" install --disable-pip-version-check -r "$wanted"; } >"$log" 2>&1; then
      tail -n 15 "$log" >&2
      die "pip failed (log: ${log#"$repo_root"/}). Check the network, put nvcc 12.4 or newer into PATH,
    or leave the GPU out: CONCLAVE_CUDA=OFF $0"
    fi
    for root in "$folder"/lib/python3*/site-packages/nvidia/cu*; do
      # What a toolkit's own folders have and the wheels leave out.
      ln -sfn lib "$root/lib64"
      (cd "$root/lib" && ln -sfn libcudart.so.* libcudart.so)
    done
    cp "$wanted" "$folder/installed.txt"
  fi
  root=$(dirname "$(dirname "$(echo "$folder"/lib/python3*/site-packages/nvidia/cu*/bin/nvcc)")")
  [[ -x $root/bin/nvcc ]] || die "no nvcc among the wheels in ${folder#"$repo_root"/}"
  export CUDACXX=$root/bin/nvcc CUDAToolkit_ROOT=$root
  note "CUDA compiler: ${CUDACXX#"$repo_root"/}"
}
