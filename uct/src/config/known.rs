//! Names of UCX's own variables. One that is set for a UCX in the same job, or for hardware that is not here, must not
//! draw a warning.

use std::collections::BTreeSet;

use parking_lot::Mutex;

/// Fields of UCX's IB interface table that are read under `IB_` and under each transport's prefix.
const IFACE: &[&str] = &[
    "ADDR_TYPE",
    "ALLOC",
    "COUNTER_SET_ID",
    "FAILURE",
    "FLID_ROUTE",
    "HOP_LIMIT",
    "IS_GLOBAL",
    "LID_PATH_BITS",
    "MAX_BCOPY",
    "MAX_NUM_EPS",
    "MAX_SHORT",
    "NUM_PATHS",
    "PATH_MTU",
    "PKEY",
    "REVERSE_SL",
    "ROCE_LOCAL_SUBNET",
    "ROCE_PATH_FACTOR",
    "ROCE_REACHABILITY_MODE",
    "ROCE_SUBNETS",
    "ROCE_SUBNET_PREFIX_LEN",
    "RX_BUFS_GROW",
    "RX_GROW_FACTOR",
    "RX_INLINE",
    "RX_MAX_BATCH",
    "RX_MAX_BUFS",
    "RX_MAX_CHUNK_SIZE",
    "RX_MAX_POLL",
    "RX_QUEUE_LEN",
    "SEG_SIZE",
    "SEND_OVERHEAD",
    "SL",
    "TRAFFIC_CLASS",
    "TX_BUFS_GROW",
    "TX_GROW_FACTOR",
    "TX_INLINE_RESP",
    "TX_MAX_BATCH",
    "TX_MAX_BUFS",
    "TX_MAX_CHUNK_SIZE",
    "TX_MAX_POLL",
    "TX_MIN_INLINE",
    "TX_MIN_SGE",
    "TX_QUEUE_LEN",
];

/// Fields of UCX's UD table.
const UD: &[&str] = &[
    "ASYNC_TIMER_TICK",
    "ETH_DGID_CHECK",
    "LINGER_TIMEOUT",
    "MAX_WINDOW",
    "MIN_POKE_TIME",
    "RX_ASYNC_MAX_POLL",
    "RX_QUEUE_LEN_INIT",
    "TIMEOUT",
    "TIMER_BACKOFF",
    "TIMER_TICK",
    // Of the accelerated variant for one vendor's devices.
    "AR_ENABLE",
    "COMPACT_AV",
    "CQE_ZIPPING_ENABLE",
    "DM_COUNT",
    "DM_SIZE",
    "MMIO_MODE",
    "SRQ_TOPO",
];

/// Fields of UCX's IB memory domain table.
const MD: &[&str] = &[
    "ASYNC_EVENTS",
    "DEVICE_SPECS",
    "DIRECT_NIC",
    "ETH_PAUSE_ON",
    "FORK_INIT",
    "GDA_DMABUF_ENABLE",
    "GDA_MAX_HCA_PER_GPU",
    "GDA_RETAIN_INACTIVE_CTX",
    "GID_INDEX",
    "GPU_DIRECT_RDMA",
    "INDIRECT_ATOMIC",
    "MAX_IDLE_RKEY_COUNT",
    "MEM_REG_GROWTH",
    "MEM_REG_OVERHEAD",
    "MLX5_DEVX",
    "MLX5_DEVX_OBJECTS",
    "MLX5_DV",
    "ODP_MEM_TYPES",
    "ODP_PREFETCH",
    "PCI_BW",
    "PCI_RELAXED_ORDERING",
    "PREFER_NEAREST_DEVICE",
    "REG_MT_BIND",
    "REG_MT_CHUNK",
    "REG_MT_THRESH",
    "REG_RETRY_CNT",
    "SMKEY_BLOCK_SIZE",
    "SUBNET_PREFIX",
    "XGVMI_UMR_ENABLE",
];

/// Variables without a prefix of those above.
const PROCESS: &[&str] = &[
    "ALLOC",
    "ALLOC_PRIO",
    "CONFIG_DIR",
    "DEBUG_SIGNO",
    "ERROR_MAIL_FOOTER",
    "ERROR_MAIL_TO",
    "ERROR_SIGNALS",
    "FAILURE",
    "GDB_COMMAND",
    "HANDLE_ERRORS",
    "KEEPALIVE_INTERVAL",
    "KEEPALIVE_NUM_EPS",
    "LOG_BUFFER",
    "LOG_DATA_SIZE",
    "LOG_FILE",
    "LOG_FILE_FILTER",
    "LOG_FILE_ROTATE",
    "LOG_FILE_SIZE",
    "LOG_LEVEL",
    "LOG_LEVEL_TRIGGER",
    "LOG_PRINT_ENABLE",
    "MAX_BCOPY",
    "MAX_NUM_EPS",
    "MAX_SHORT",
    "MEMTRACK_DEST",
    "MEMTYPE_CACHE",
    "MODULES",
    "MODULE_DIR",
    "MODULE_LOG_LEVEL",
    "NET_DEVICES",
    "PROFILE_FILE",
    "PROFILE_LOG_SIZE",
    "PROFILE_MODE",
    "PROTO_INFO",
    "RCACHE_ENABLE",
    "STATS_DEST",
    "STATS_FILTER",
    "STATS_FORMAT",
    "STATS_TRIGGER",
    "TLS",
    "TOPO_PRIO",
    "USE_MT_MUTEX",
    "VFS_ENABLE",
    "VFS_THREAD_AFFINITY",
    "WARN_UNUSED_ENV_VARS",
];

/// True for a name that UCX itself gives a meaning to.
pub(super) fn is_ucx_name(name: &str) -> bool {
    let Some(rest) = name.strip_prefix("UCX_") else { return false };
    let under = |prefix: &str, tables: &[&[&str]]| {
        rest.strip_prefix(prefix).is_some_and(|field| tables.iter().any(|t| t.contains(&field)))
    };
    PROCESS.contains(&rest)
        || rest.starts_with("RCACHE_")
        || under("IB_", &[IFACE, MD])
        || under("UD_", &[IFACE, UD])
        || under("UD_VERBS_", &[IFACE, UD])
        || under("UD_MLX5_", &[IFACE, UD])
        || under("SRD_", &[IFACE, &["RX_QUEUE_LEN_INIT", "MAX_RDMA_READ", "CONTROL_QP", "UD_RX_QUEUE_LEN_INIT"]])
}

/// Names that were changed: old, new. The old ones go on working.
const RENAMED: &[(&str, &str)] = &[
    ("UCX_UD_SLOW_TIMER_TICK", "UCX_UD_TIMER_TICK"),
    ("UCX_UD_VERBS_SLOW_TIMER_TICK", "UCX_UD_VERBS_TIMER_TICK"),
    ("UCX_UD_SLOW_TIMER_BACKOFF", "UCX_UD_TIMER_BACKOFF"),
    ("UCX_UD_VERBS_SLOW_TIMER_BACKOFF", "UCX_UD_VERBS_TIMER_BACKOFF"),
];

/// The new name of a variable that was renamed. Says so once per process.
pub(super) fn renamed(name: &str) -> Option<&'static str> {
    let (_, new) = RENAMED.iter().find(|(old, _)| *old == name)?;
    if first_time(name) {
        tracing::warn!("{name} is the old name of {new}; it still works");
    }
    Some(new)
}

/// True the first time it is asked about a variable in this process: each is complained about once.
pub(crate) fn first_time(name: &str) -> bool {
    static SEEN: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    SEEN.lock().insert(name.to_string())
}

/// The number of letters to insert, delete, change or swap with their neighbour to get from `a` to `b`; more than `limit`
/// is reported as `limit + 1`.
pub(super) fn edit_distance(a: &str, b: &str, limit: usize) -> usize {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    if a.len().abs_diff(b.len()) > limit {
        return limit + 1;
    }
    let mut before: Vec<usize> = vec![0; b.len() + 1];
    let mut last: Vec<usize> = (0..=b.len()).collect();
    for i in 1..=a.len() {
        let mut row = vec![i; b.len() + 1];
        for j in 1..=b.len() {
            let change = last[j - 1] + usize::from(a[i - 1] != b[j - 1]);
            row[j] = change.min(last[j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                row[j] = row[j].min(before[j - 2] + 1);
            }
        }
        before = std::mem::replace(&mut last, row);
    }
    last[b.len()].min(limit + 1)
}
