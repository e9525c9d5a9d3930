# What the scripts beside this one share. To be sourced, inside ci/soft-roce.

# Waits until a server listens: port, its process, and what to put in front of a command to be where it is.
listens() {
    local port=$1 pid=$2
    shift 2
    for _ in $(seq 600); do
        # Not a connection to try: the servers take only one.
        [ -z "$("$@" ss -Htln "sport = :$port")" ] || return 0
        kill -0 "$pid" 2>/dev/null || return 1
        sleep 0.05
    done
    return 1
}

# The index of rxe0's GID of IP version 4 or 6.
gid_index() {
    local gids=/sys/class/infiniband/rxe0/ports/1/gids i prefix=0000:0000:0000:0000:0000:ffff:0a4d:0001
    [ "$1" = 4 ] || prefix=fd77:
    for i in 0 1 2 3 4 5 6 7; do
        if [[ $(cat "$gids/$i") == "$prefix"* ]]; then
            echo "$i"
            return 0
        fi
    done
    echo "no GID of IPv$1 on rxe0" >&2
    return 1
}
