//! Netlink messages: [`parse`] makes events and answers of bytes, [`question`] and [`dump`] make bytes.
//!
//! The bytes come from the kernel, and yet no byte string does harm: what does not parse is passed over, or where that
//! could hide something, taken for the widest event it can be.

use std::net::IpAddr;

use netlink_packet_core::{
    ErrorBuffer, ErrorMessage, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NetlinkBuffer, NetlinkHeader,
    NetlinkMessage, NetlinkPayload, Parseable,
};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    address::AddressHeader,
    link::{LinkHeader, LinkMessage},
    neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState},
    route::{RouteAddress, RouteAttribute, RouteFlags, RouteMessage, RouteType, RouteVia},
};

use super::paths::{Answer, Event, Hop, ID_RESERVED, Neighbour, Question};

/// The numbers of a dump of the neighbours, and of a barrier.
const DUMP_ID: u32 = 1;
const BARRIER_ID: u32 = ID_RESERVED;
/// The loopback's; every network namespace has it.
const LOOPBACK: u32 = 1;

// Types of messages. The crate keeps its own to itself.
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLMSG_OVERRUN: u16 = 4;
const RTM_NEWLINK: u16 = libc::RTM_NEWLINK;
const RTM_DELLINK: u16 = libc::RTM_DELLINK;
const RTM_NEWADDR: u16 = libc::RTM_NEWADDR;
const RTM_DELADDR: u16 = libc::RTM_DELADDR;
const RTM_NEWROUTE: u16 = libc::RTM_NEWROUTE;
const RTM_DELROUTE: u16 = libc::RTM_DELROUTE;
const RTM_NEWNEIGH: u16 = libc::RTM_NEWNEIGH;
const RTM_DELNEIGH: u16 = libc::RTM_DELNEIGH;
const RTM_NEWRULE: u16 = libc::RTM_NEWRULE;
const RTM_DELRULE: u16 = libc::RTM_DELRULE;
/// Objects that routes refer to instead of naming gateways; not in libc.
const RTM_NEWNEXTHOP: u16 = 104;
const RTM_DELNEXTHOP: u16 = 105;

/// What a message comes to.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(super) enum Item {
    Event(Event),
    /// To the question of this number.
    Answer(u32, Answer),
    /// What was being dumped has changed meanwhile: some of it may be missing.
    DumpInterrupted,
    DumpEnd,
}

/// Appends what the messages in `bytes` say. `port` is the socket's own address: who else's answers come along as events.
pub(super) fn parse(mut bytes: &[u8], port: u32, out: &mut Vec<Item>) {
    while let Ok(message) = NetlinkBuffer::new_checked(bytes) {
        let Ok(header) = NetlinkHeader::parse(&message) else { return };
        let ours = header.port_number == port && header.sequence_number > 0;
        one(&header, ours, message.payload(), out);
        // The check says that the length is that of a header or more, and within the bytes.
        let len = message.length() as usize;
        bytes = &bytes[len.next_multiple_of(4).min(bytes.len())..];
    }
}

fn one(header: &NetlinkHeader, ours: bool, payload: &[u8], out: &mut Vec<Item>) {
    let id = header.sequence_number;
    if ours && id == BARRIER_ID {
        return;
    }
    if ours && id == DUMP_ID && header.flags & NLM_F_DUMP_INTR != 0 {
        out.push(Item::DumpInterrupted);
    }
    let interface = |index: u32| Item::Event(Event::Interface(index));
    match header.message_type {
        NLMSG_ERROR if ours => match (id, errno(payload)) {
            (_, Some(0)) => {}
            (DUMP_ID, errno) => {
                tracing::debug!("the kernel does not list its neighbours: errno {errno:?}");
                out.push(Item::DumpEnd);
            }
            (id, errno) => out.push(Item::Answer(id, refusal(errno))),
        },
        NLMSG_DONE if ours && id == DUMP_ID => out.push(Item::DumpEnd),
        NLMSG_OVERRUN => out.push(Item::Event(Event::Lost)),
        RTM_NEWNEIGH | RTM_DELNEIGH => match NeighbourMessage::parse(payload) {
            Ok(message) => neighbour(&message, header.message_type == RTM_DELNEIGH, out),
            Err(e) => tracing::debug!("passed over news of a neighbour: {e}"),
        },
        RTM_NEWROUTE if ours => {
            let answer = RouteMessage::parse(payload).map_or(Answer::Unknown, |m| answer(&m));
            out.push(Item::Answer(id, answer));
        }
        RTM_NEWROUTE | RTM_DELROUTE => match RouteMessage::parse(payload) {
            Ok(message) => out.extend(route(&message).map(Item::Event)),
            Err(_) => out.push(Item::Event(Event::Routing)),
        },
        RTM_NEWLINK | RTM_DELLINK => out.extend(LinkHeader::parse(payload).map(|h| interface(h.index))),
        RTM_NEWADDR | RTM_DELADDR => out.extend(AddressHeader::parse(payload).map(|h| interface(h.index))),
        RTM_NEWRULE | RTM_DELRULE | RTM_NEWNEXTHOP | RTM_DELNEXTHOP => out.push(Item::Event(Event::Routing)),
        _ => {}
    }
}

/// The errno of an error message, 0 for an acknowledgement.
fn errno(payload: &[u8]) -> Option<i32> {
    let message = ErrorBuffer::new_checked(&payload).and_then(|b| ErrorMessage::parse(&b)).ok()?;
    Some(message.code.map_or(0, |code| code.get().saturating_neg()))
}

/// What it means when the kernel has no route to show.
fn refusal(errno: Option<i32>) -> Answer {
    match errno {
        // The last three are how it answers for routes that prohibit or swallow, and for local addresses or interfaces that
        // are gone.
        Some(libc::ENETUNREACH | libc::EHOSTUNREACH | libc::EACCES | libc::EINVAL | libc::ENODEV) => Answer::NoRoute,
        _ => Answer::Unknown,
    }
}

fn neighbour(message: &NeighbourMessage, deleted: bool, out: &mut Vec<Item>) {
    let header = &message.header;
    // Of addresses that this host answers for on behalf of others.
    if header.flags.contains(NeighbourFlags::Proxy) {
        return;
    }
    let mut ip = None;
    let mut mac = None;
    for attribute in &message.attributes {
        match attribute {
            NeighbourAttribute::Destination(NeighbourAddress::Inet(v4)) => ip = Some(IpAddr::V4(*v4)),
            NeighbourAttribute::Destination(NeighbourAddress::Inet6(v6)) => ip = Some(IpAddr::V6(*v6)),
            NeighbourAttribute::LinkLayerAddress(bytes) => mac = bytes.as_slice().try_into().ok(),
            _ => {}
        }
    }
    // Entries of bridges have none.
    let Some(ip) = ip else { return };
    let hop = Hop { ifindex: header.ifindex, ip };
    let state = match (header.state, mac) {
        (NeighbourState::Failed, _) => Neighbour::Failed,
        (NeighbourState::Incomplete | NeighbourState::None, _) | (_, None) => Neighbour::Asked,
        (_, Some(mac)) => Neighbour::At(mac),
    };
    // An entry that is collected says last what it was; only the failure is news.
    if !deleted || state == Neighbour::Failed {
        out.push(Item::Event(Event::Neighbour(hop, state)));
    }
    if deleted {
        out.push(Item::Event(Event::Neighbour(hop, Neighbour::Gone)));
    }
}

fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(v4) => Some(IpAddr::V4(*v4)),
        RouteAddress::Inet6(v6) => Some(IpAddr::V6(*v6)),
        _ => None,
    }
}

/// The event that a change of a route is.
fn route(message: &RouteMessage) -> Option<Event> {
    let header = &message.header;
    let everything = match header.address_family {
        AddressFamily::Inet => IpAddr::from([0u8; 4]),
        AddressFamily::Inet6 => IpAddr::from([0u8; 16]),
        _ => return None,
    };
    // Exceptions that the kernel notes for single destinations, such as a smaller MTU.
    if header.flags.contains(RouteFlags::Cloned) {
        return None;
    }
    let net = message.attributes.iter().find_map(|a| match a {
        RouteAttribute::Destination(address) => ip(address),
        _ => None,
    });
    // Default routes have none.
    Some(match net {
        Some(net) => Event::Route(net, header.destination_prefix_length),
        None => Event::Route(everything, 0),
    })
}

/// What a route that was asked for says.
fn answer(message: &RouteMessage) -> Answer {
    match message.header.kind {
        RouteType::Unicast => {}
        RouteType::Local | RouteType::Broadcast | RouteType::Anycast | RouteType::Multicast => return Answer::Here,
        RouteType::BlackHole | RouteType::Unreachable | RouteType::Prohibit | RouteType::Throw => {
            return Answer::NoRoute;
        }
        _ => return Answer::Unknown,
    }
    let mut oif = None;
    let mut gateway = None;
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Oif(index) => oif = Some(*index),
            RouteAttribute::Gateway(address) => gateway = ip(address),
            // An IPv4 route through an IPv6 gateway.
            RouteAttribute::Via(RouteVia::Inet(v4)) => gateway = Some(IpAddr::V4(*v4)),
            RouteAttribute::Via(RouteVia::Inet6(v6)) => gateway = Some(IpAddr::V6(*v6)),
            _ => {}
        }
    }
    oif.map_or(Answer::Unknown, |ifindex| Answer::Via { ifindex, gateway })
}

fn bytes(id: u32, flags: u16, inner: RouteNetlinkMessage) -> Vec<u8> {
    let mut message = NetlinkMessage::new(NetlinkHeader::default(), NetlinkPayload::from(inner));
    message.header.flags = flags;
    message.header.sequence_number = id;
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    bytes
}

/// The request for a route.
pub(super) fn question(q: &Question) -> Vec<u8> {
    let mut message = RouteMessage::default();
    let (family, bits) = match q.to {
        IpAddr::V4(_) => (AddressFamily::Inet, 32),
        IpAddr::V6(_) => (AddressFamily::Inet6, 128),
    };
    message.header.address_family = family;
    message.header.destination_prefix_length = bits;
    message.header.source_prefix_length = bits;
    message.attributes.push(RouteAttribute::Destination(q.to.into()));
    message.attributes.push(RouteAttribute::Source(q.from.into()));
    if q.ifindex != 0 {
        message.attributes.push(RouteAttribute::Oif(q.ifindex));
    }
    bytes(q.id, NLM_F_REQUEST, RouteNetlinkMessage::GetRoute(message))
}

/// A request that ends when all changes of routes are made that were told before: the kernel makes them with the lock held
/// that it takes for this one, whereas it answers for routes without. What it answers is of no interest.
pub(super) fn barrier() -> Vec<u8> {
    let mut message = LinkMessage::default();
    message.header.index = LOOPBACK;
    bytes(BARRIER_ID, NLM_F_REQUEST, RouteNetlinkMessage::GetLink(message))
}

/// The request for all neighbours.
pub(super) fn dump() -> Vec<u8> {
    let request = RouteNetlinkMessage::GetNeighbour(NeighbourMessage::default());
    bytes(DUMP_ID, NLM_F_REQUEST | NLM_F_DUMP, request)
}
