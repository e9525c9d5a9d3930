# What scripts in this directory share. To be sourced.

# What the feature rdma-core needs to build, and is not here: names of packages.
rdma_missing() {
    if ! command -v pkg-config >/dev/null; then
        echo pkg-config
    elif ! pkg-config --exists libibverbs librdmacm; then
        echo libibverbs-dev librdmacm-dev
    fi
    # bindgen loads it and needs clang's own headers beside it.
    if [ -z "${LIBCLANG_PATH:-}" ]; then
        local lib=/usr/lib/llvm-*/lib
        compgen -G "$lib/libclang[.-][0-9s]*" >/dev/null && compgen -G "$lib/clang/*/include/stddef.h" >/dev/null ||
            [ -e /usr/lib64/libclang.so ] || echo libclang-dev
    fi
}

# The features to build the workspace with for tests: as much as this machine can.
test_features() {
    [ -z "$(rdma_missing)" ] || return 0
    local second=""
    # The crate ibverbs builds a copy of rdma-core to make its bindings from.
    [ -n "$(ibverbs_missing)" ] || second=,uct-tests/ibverbs
    echo "--features=ib/rdma-core,ud/rdma-core,uct-tools/rdma-core,uct-tests/rdma-core$second"
}

# What the feature ibverbs of the tests needs besides.
ibverbs_missing() {
    command -v cmake >/dev/null || echo cmake
    pkg-config --exists libnl-3.0 libnl-route-3.0 2>/dev/null || echo libnl-3-dev libnl-route-3-dev
}

# Ends a step that cannot run here. On the CI server that is a failure: a proof that is skipped there is none.
cannot() {
    echo "not installed: $*"
    [ "${CI:-}" != true ] || exit 1
    exit 0
}
