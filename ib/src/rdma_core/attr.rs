//! Values of verbs as values of this library, and back. Safe code without a device.

use rdma_sys::{
    ibv_ah_attr, ibv_device_attr, ibv_event_type as Event, ibv_gid, ibv_port_attr, ibv_port_state, ibv_wc_status,
};

use super::{ffi::Zero, handles::RawEvent};
use crate::{
    device::{Access, AhAttr, AsyncEvent, LinkLayer, PortAttr, QueueLimits, WcStatus},
    types::{Lid, Mtu, PKey, Qpn},
};

/// `IBV_LINK_LAYER_ETHERNET`, a macro-like enum in C that the bindings leave out of the structure.
const ETHERNET: u8 = 2;

/// The kind of network. Devices older than the field leave it 0, and those are InfiniBand.
pub(super) fn link_layer(attr: &ibv_port_attr) -> LinkLayer {
    if attr.link_layer == ETHERNET { LinkLayer::Ethernet } else { LinkLayer::InfiniBand }
}

/// A port as the device tells it. An MTU that is none counts as the smallest.
pub(super) fn port(attr: &ibv_port_attr, pkeys: Vec<PKey>) -> PortAttr {
    PortAttr {
        active: attr.state == ibv_port_state::IBV_PORT_ACTIVE,
        link_layer: link_layer(attr),
        active_mtu: u8::try_from(attr.active_mtu).ok().and_then(Mtu::from_code).unwrap_or(Mtu::M256),
        lid: Lid(attr.lid),
        lmc: attr.lmc,
        pkeys,
        gid_table_len: usize::try_from(attr.gid_tbl_len).unwrap_or(0),
        bandwidth_bps: bandwidth(attr.active_speed, attr.active_width),
    }
}

/// What queue pairs of a device can have. Each queue has a completion queue of its own.
pub(super) fn queue_limits(attr: &ibv_device_attr) -> QueueLimits {
    let number = |n: i32| u32::try_from(n).unwrap_or(0);
    QueueLimits { depth: number(attr.max_qp_wr.min(attr.max_cqe)), qps: number(attr.max_qp) }
}

/// Bytes per second after line coding, 0 for codes that are not known.
pub(super) fn bandwidth(speed: u8, width: u8) -> f64 {
    let lanes = match width {
        1 => 1.0,
        2 => 4.0,
        4 => 8.0,
        8 => 12.0,
        16 => 2.0,
        _ => return 0.0,
    };
    let gigabits = match speed {
        // 8 of 10 bits are data.
        1 => 2.5 * 0.8,
        2 => 5.0 * 0.8,
        4 => 10.0 * 0.8,
        // 64 of 66 are; the newer speeds are named by what they carry.
        8 => 10.3125 * 64.0 / 66.0,
        16 => 14.0625 * 64.0 / 66.0,
        32 => 25.78125 * 64.0 / 66.0,
        64 => 50.0,
        128 => 100.0,
        _ => return 0.0,
    };
    gigabits * lanes * 1e9 / 8.0
}

/// The attributes of an address handle. `sgid_index` is where its local GID is now.
pub(super) fn ah(attr: &AhAttr, sgid_index: u8) -> ibv_ah_attr {
    let mut out = ibv_ah_attr::zero();
    if let Some(grh) = &attr.grh {
        out.is_global = 1;
        out.grh.dgid = ibv_gid { raw: grh.dgid.0 };
        out.grh.sgid_index = sgid_index;
        out.grh.hop_limit = grh.hop_limit;
        out.grh.traffic_class = grh.traffic_class;
        out.grh.flow_label = grh.flow_label;
    }
    out.dlid = attr.dlid.0;
    out.sl = attr.sl;
    out.src_path_bits = attr.src_path_bits;
    out.static_rate = attr.static_rate;
    out.port_num = attr.port;
    out
}

/// Access flags of verbs. Remote writing demands local writing.
pub(super) fn access(access: Access) -> i32 {
    use rdma_sys::ibv_access_flags as F;
    let mut flags = 0;
    if access.intersects(Access::LOCAL_WRITE | Access::REMOTE_WRITE) {
        flags |= F::IBV_ACCESS_LOCAL_WRITE.0;
    }
    if access.contains(Access::REMOTE_WRITE) {
        flags |= F::IBV_ACCESS_REMOTE_WRITE.0;
    }
    if access.contains(Access::REMOTE_READ) {
        flags |= F::IBV_ACCESS_REMOTE_READ.0;
    }
    flags as i32
}

/// The status of a completion.
#[inline]
pub(super) fn status(status: u32) -> WcStatus {
    if status == ibv_wc_status::IBV_WC_SUCCESS { WcStatus::Success } else { failure(status) }
}

#[cold]
#[inline(never)]
fn failure(status: u32) -> WcStatus {
    match status {
        ibv_wc_status::IBV_WC_LOC_LEN_ERR => WcStatus::LocalLength,
        ibv_wc_status::IBV_WC_LOC_QP_OP_ERR => WcStatus::LocalQpOp,
        ibv_wc_status::IBV_WC_LOC_PROT_ERR => WcStatus::LocalProtection,
        ibv_wc_status::IBV_WC_WR_FLUSH_ERR => WcStatus::WrFlush,
        other => WcStatus::Other(other),
    }
}

/// An event of the device.
pub(super) fn event(e: &RawEvent) -> AsyncEvent {
    let is = |kind: Event| kind as u32 == e.kind;
    let port = e.port;
    if is(Event::IBV_EVENT_PORT_ACTIVE) {
        AsyncEvent::PortActive(port)
    } else if is(Event::IBV_EVENT_PORT_ERR) {
        AsyncEvent::PortError(port)
    } else if is(Event::IBV_EVENT_GID_CHANGE) {
        AsyncEvent::GidChange(port)
    } else if is(Event::IBV_EVENT_LID_CHANGE) {
        AsyncEvent::LidChange(port)
    } else if is(Event::IBV_EVENT_SM_CHANGE) {
        AsyncEvent::SmChange(port)
    } else if is(Event::IBV_EVENT_CLIENT_REREGISTER) {
        AsyncEvent::ClientReregister(port)
    } else if is(Event::IBV_EVENT_PKEY_CHANGE) {
        AsyncEvent::PkeyChange(port)
    } else if is(Event::IBV_EVENT_DEVICE_FATAL) {
        AsyncEvent::DeviceFatal
    } else if (is(Event::IBV_EVENT_QP_FATAL) || is(Event::IBV_EVENT_QP_REQ_ERR) || is(Event::IBV_EVENT_QP_ACCESS_ERR))
        && let Some(qpn) = e.qpn
    {
        AsyncEvent::QpFatal(Qpn::truncate(qpn))
    } else {
        AsyncEvent::Unknown(e.kind)
    }
}
