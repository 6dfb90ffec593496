# Source this to serve SGLang on a CPU: `source scripts/cpu_env.sh`.
# Nothing else is needed before SGLang is imported, child processes inherit it, and a shell
# without these variables behaves as if dcut_sglang's CPU support did not exist.
_dcut_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# SGLang's own switch for its CPU engine; it also activates our CPU platform.
export SGLANG_USE_CPU_ENGINE=1
# Stand-ins for two packages whose PyPI builds assume CUDA (real CPU builds win).
export PYTHONPATH="$_dcut_root/dcut_sglang/host/cpu/shims${PYTHONPATH:+:$PYTHONPATH}"
# More threads than idle cores make every GEMM wait for the slowest one.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# libc's allocator costs up to 18 % of a server's decoding (bench_results/LOG.md).
# Debian's libtcmalloc-minimal4 is used where it is installed, as SGLang's guide to CPUs does.
for _dcut_lib in /usr/lib/*/libtcmalloc_minimal.so.4 /usr/lib64/libtcmalloc_minimal.so.4; do
    case "${LD_PRELOAD:-}" in
        *malloc*) break ;;
    esac
    [ ! -e "$_dcut_lib" ] || export LD_PRELOAD="$_dcut_lib${LD_PRELOAD:+:$LD_PRELOAD}"
done
unset _dcut_root _dcut_lib
