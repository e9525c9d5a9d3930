//! Names for the engine's counters.

use uct::iface::Counter;

use crate::proto::{DropReason, EngineStats};

/// Appends the engine's counters, in a fixed order.
pub(crate) fn engine(s: &EngineStats, all: &mut Vec<Counter>) {
    let named = [
        ("rx.packets", s.rx_packets),
        ("rx.delivered", s.rx_delivered),
        ("rx.held", s.rx_held),
        ("rx.nacks", s.rx_nacks),
        ("rx.acks_new", s.acks_new),
        ("rx.acks_old", s.acks_old),
        ("rx.acks_beyond", s.acks_beyond),
        ("tx.am", s.tx_am),
        ("tx.resends", s.tx_resends),
        ("tx.acks", s.tx_acks),
        ("tx.nacks", s.tx_nacks),
        ("tx.xacks", s.tx_xacks),
        ("tx.creq", s.tx_creq),
        ("tx.crep", s.tx_crep),
        ("tx.probes", s.tx_probes),
        ("tx.byes", s.tx_byes),
        ("tx.cwnd_cuts", s.cwnd_cuts),
        ("tx.timer_resends", s.timer_resends),
        ("tx.budget_refusals", s.budget_refusals),
        ("ep.passive_created", s.passive_created),
        ("ep.passive_refused", s.passive_refused),
        ("ep.passive_claimed", s.passive_claimed),
        ("ep.restarts", s.restarts),
        ("ep.stale_dest", s.stale_dest),
        ("ep.failures", s.ep_failures),
        ("stopped", s.stopped),
    ];
    all.extend(named.map(|(name, value)| Counter { name, value }));
    all.extend(DropReason::ALL.iter().map(|&r| Counter { name: drop_name(r), value: s.dropped(r) }));
}

fn drop_name(r: DropReason) -> &'static str {
    match r {
        DropReason::Short => "rx.drop.short",
        DropReason::Malformed => "rx.drop.malformed",
        DropReason::UnknownEp => "rx.drop.unknown_ep",
        DropReason::WrongSource => "rx.drop.wrong_source",
        DropReason::Duplicate => "rx.drop.duplicate",
        DropReason::Gap => "rx.drop.gap",
        DropReason::NoRoom => "rx.drop.no_room",
        DropReason::Closed => "rx.drop.closed",
        DropReason::EpFailed => "rx.drop.ep_failed",
        DropReason::Unexpected => "rx.drop.unexpected",
        DropReason::UnknownControl => "rx.drop.unknown_control",
        DropReason::StaleProcess => "rx.drop.stale_process",
        DropReason::DoubtfulProcess => "rx.drop.doubtful_process",
        DropReason::WrongEpId => "rx.drop.wrong_ep_id",
        DropReason::TooManyPassive => "rx.drop.too_many_passive",
        DropReason::PutRefused => "rx.drop.put_refused",
        DropReason::BadConnSn => "rx.drop.bad_conn_sn",
        DropReason::NoEpId => "rx.drop.no_ep_id",
    }
}
