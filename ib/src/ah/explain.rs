//! The words for what went wrong: device and port, both GIDs, the errno with its likely causes, and the way out.

use uct::{Blame, Error, ErrorKind, Scope};

use crate::device::{AhAttr, VerbsError};

/// What the cache knew when a creation failed.
pub(super) struct Situation<'a> {
    pub(super) device: &'a str,
    /// The place of the local GID in the table last read, if it is there.
    pub(super) sgid_index: Option<u8>,
    /// The device's limit, 0 if unlimited.
    pub(super) ah_max: usize,
    pub(super) live: u64,
    pub(super) idle: usize,
}

/// The error of a creation that failed.
pub(super) fn creation(at: &Situation<'_>, attr: &AhAttr, why: VerbsError) -> Error {
    let (kind, blame, causes) = match why.errno {
        libc::ETIMEDOUT => (
            ErrorKind::EndpointTimeout,
            Blame::Network,
            "the link address of the peer (or of its gateway) was not resolved: peer down, wrong subnet, or ARP/ND \
             blocked; see `ip neigh`"
                .to_string(),
        ),
        libc::ENETUNREACH | libc::EHOSTUNREACH => (
            ErrorKind::Unreachable,
            Blame::Network,
            "no route from the local GID to the peer: see `ip route get`, or choose another GID with UCX_IB_GID_INDEX"
                .to_string(),
        ),
        libc::ENODATA => (
            ErrorKind::Unreachable,
            Blame::System,
            "the local GID is not in the port's table: its address was removed or is not there yet; try again when it \
             is back"
                .to_string(),
        ),
        libc::EINVAL => (
            ErrorKind::InvalidAddress,
            Blame::Peer,
            "likely causes: the two GIDs are of different kinds (RoCE v1 and v2, IPv4 and IPv6, link-local and \
             routable), the peer's GID is malformed, or the local GID's interface is down; choose a matching GID with \
             UCX_IB_GID_INDEX on either side"
                .to_string(),
        ),
        libc::ENOMEM => (ErrorKind::NoMemory, Blame::System, no_memory(at)),
        _ => (ErrorKind::Io, Blame::System, "the device refused".to_string()),
    };
    let index = match (&attr.grh, at.sgid_index) {
        (None, _) => String::new(),
        (Some(_), Some(i)) => format!(" (sgid index {i})"),
        (Some(_), None) => " (sgid not in the GID table)".to_string(),
    };
    let text = format!("{}:{}: {} for {attr}{index}: {causes}", at.device, attr.port, why.call);
    Error::new(kind, text).with_errno(why.errno).scoped(Scope::Endpoint).blaming(blame)
}

fn no_memory(at: &Situation<'_>) -> String {
    let limit = match at.ah_max {
        0 => "no stated limit".to_string(),
        n => format!("a limit of {n}"),
    };
    format!(
        "the device, with {limit}, has no room for another address handle, and none of the {} in existence could be given \
         up ({} idle); close endpoints, or spread them over more devices or processes",
        at.live, at.idle
    )
}

/// The error of a get on a closed cache.
pub(super) fn closed(device: &str, attr: &AhAttr) -> Error {
    let text = format!(
        "{device}:{}: address-handle cache is closed, so {attr} cannot be had; open the device again",
        attr.port
    );
    Error::new(ErrorKind::Closed, text)
}

/// The error of a get whose creation was overtaken by closing.
pub(super) fn closed_during(device: &str) -> Error {
    Error::new(
        ErrorKind::Closed,
        format!("{device}: the address-handle cache was closed while the handle was being created"),
    )
}

/// The error of a stranger's get beyond the quota.
pub(super) fn quota(device: &str, attr: &AhAttr, quota: usize) -> Error {
    let text = format!(
        "{device}:{}: {attr}: {quota} resolutions on behalf of unknown peers are in flight already; try again later",
        attr.port
    );
    Error::new(ErrorKind::ExceedsLimit, text)
}

#[cfg(not(uct_loom))]
/// The error of a creation that could not even be started.
pub(super) fn no_thread(device: &str, attr: &AhAttr, errno: i32) -> Error {
    let text = format!("{device}:{}: {attr}: cannot start a helper thread for create_ah: see ulimit -u", attr.port);
    Error::new(ErrorKind::Io, text).with_errno(errno).scoped(Scope::Endpoint)
}
