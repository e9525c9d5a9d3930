//! [`Device`]: what a transport needs of verbs, as one trait. Start reading here; the four implementations are
//! [`soft`](crate::soft) (RoCEv2 from user space), [`sim`](crate::sim) (simulated network, virtual time),
//! [`mock`](crate::mock) (scripted results around another device) and, with the feature of that name, rdma-core.
//!
//! The data path is statically dispatched: a transport's interface is generic over `D: Device`. Semantics are those of
//! verbs, including the unkind ones: UD drops are silent, a bad receive or a send through an address handle whose local
//! GID is gone puts the queue pair into the ERROR state, completions of one queue come in order.
//!
//! Buffers that the device writes are moved into the queue pair ([`UdQp::post_recv`]) and come back by value
//! ([`RecvWc::buf`]). Buffers that the device reads are borrowed for the duration of [`UdQp::post_send`] by devices that
//! copy ([`QpCaps::copies_sends`]); for the others the caller keeps the bytes alive and unchanged until a completion with
//! `serial >=` that of the work request has been polled. Both transports always follow the stricter rule.

use std::{fmt, os::fd::RawFd, sync::Arc};

use uct::mem::{Block, Buf};

use crate::types::{Gid, Lid, Mtu, PKey, QKey, Qpn};

/// The bytes in front of the payload of every UD receive, with or without a GRH in them.
pub const GRH_LEN: usize = 40;

/// Why a verbs call failed. `errno` is captured right after the call.
#[derive(Copy, Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{call}: {}", uct::error::errno_text(*errno))]
pub struct VerbsError {
    /// The verbs call, for example `create_ah`.
    pub call: &'static str,
    /// The errno.
    pub errno: i32,
}

impl VerbsError {
    /// An error of `call`.
    pub const fn new(call: &'static str, errno: i32) -> Self {
        VerbsError { call, errno }
    }
}

/// The result of a verbs call.
pub type VerbsResult<T> = Result<T, VerbsError>;

/// The kind of network behind a port.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Hash)]
pub enum LinkLayer {
    /// RoCE: addressed by GID.
    Ethernet,
    /// InfiniBand: addressed by LID, and by GID across subnets.
    InfiniBand,
}

/// The RoCE version of a GID table entry.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub enum RoceVersion {
    /// Ethertype 0x8915, not routable.
    V1,
    /// UDP port 4791.
    V2,
    /// The version could not be read; ranked last, never guessed.
    Unknown,
}

/// One valid entry of a port's GID table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GidEntry {
    /// Its place in the table. It moves when addresses come and go: compare GIDs, not indexes.
    pub index: u8,
    /// The GID.
    pub gid: Gid,
    /// RoCE version; `V2` on InfiniBand, where it has no meaning.
    pub version: RoceVersion,
    /// The network interface behind it, if known.
    pub netdev: Option<String>,
}

/// What a port tells about itself.
#[derive(Clone, PartialEq, Debug)]
pub struct PortAttr {
    /// True if the port is ACTIVE.
    pub active: bool,
    /// Its kind of network.
    pub link_layer: LinkLayer,
    /// MTU in force.
    pub active_mtu: Mtu,
    /// Local identifier (InfiniBand).
    pub lid: Lid,
    /// 2^lmc path bits belong to the port.
    pub lmc: u8,
    /// The partition table.
    pub pkeys: Vec<PKey>,
    /// Length of the GID table, valid entries or not.
    pub gid_table_len: usize,
    /// Usable bandwidth in bytes per second, 0 if unknown.
    pub bandwidth_bps: f64,
}

/// What a device tells about itself.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceAttr {
    /// The verbs name, for example `rxe0` or `soft0`.
    pub name: String,
    /// The number of ports; ports count from 1.
    pub port_count: u8,
    /// The largest number of address handles, 0 if unlimited.
    pub ah_max: usize,
    /// True if `create_ah` may sleep (kernel address resolution): it then runs on a helper thread. Of such devices it is also
    /// assumed that reading a GID table and registering memory may sleep, which no progress path then does. That resetting a
    /// queue pair does is told by [`UdQp::begin_reset`].
    pub ah_create_sleeps: bool,
    /// What peers of this library must know, appended to the packed device address; `None` for devices that a UCX peer
    /// sees as they are.
    pub soft: Option<SoftIdentity>,
}

/// The extra identity of devices that share a host (soft and simulated ones). See `ib::addr` for its wire form.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Hash, Default)]
pub struct SoftIdentity {
    /// The UDP port the device listens on.
    pub udp_port: u16,
    /// A hash of boot id and network namespace: equal for devices that can reach one another's loopback addresses.
    pub host_id: u64,
    /// Bytes of kernel receive memory, the unit in which receive budgets are counted.
    pub rx_budget: u32,
}

/// The device-specific part of an address handle's attributes.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Hash, Default, PartialOrd, Ord)]
pub struct SoftAv {
    /// UDP port of the peer's device; 4791 for kernel and hardware peers.
    pub udp_port: u16,
    /// The peer's host id, 0 if it sent none.
    pub host_id: u64,
}

/// The global part of an address handle's attributes.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub struct GlobalRoute {
    /// Where to.
    pub dgid: Gid,
    /// From which local GID: its value, because its index moves. Devices look the index up at creation.
    pub sgid: Gid,
    /// IP hop limit.
    pub hop_limit: u8,
    /// IP TOS / traffic class.
    pub traffic_class: u8,
    /// IPv6 flow label; selects the UDP source port on some devices.
    pub flow_label: u32,
}

/// Everything that makes one address handle different from another: the key of the AH cache.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub struct AhAttr {
    /// Local port, from 1.
    pub port: u8,
    /// Service level, 0 to 15.
    pub sl: u8,
    /// Source path bits.
    pub src_path_bits: u8,
    /// Static rate, 0 for the port's.
    pub static_rate: u8,
    /// Destination LID with path bits; on RoCE the source-port seed `0xc000 | factor * path_index`.
    pub dlid: Lid,
    /// The GRH, if the packet carries one (always on RoCE).
    pub grh: Option<GlobalRoute>,
    /// For soft devices.
    pub soft: SoftAv,
}

impl fmt::Display for AhAttr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.grh {
            Some(g) => write!(f, "dgid {} sgid {} port {}", g.dgid, g.sgid, self.port)?,
            None => write!(f, "dlid {:#x} port {}", self.dlid.0, self.port)?,
        }
        if self.soft.udp_port != 0 {
            write!(f, " udp port {}", self.soft.udp_port)?;
        }
        write!(f, " sl {} path bits {}", self.sl, self.src_path_bits)
    }
}

bitflags::bitflags! {
    /// What a registration allows.
    #[derive(Copy, Clone, PartialEq, Eq, Debug, Hash)]
    pub struct Access: u32 {
        /// The device may write it on behalf of this process (receives).
        const LOCAL_WRITE = 1;
        /// Peers may write it.
        const REMOTE_WRITE = 2;
        /// Peers may read it.
        const REMOTE_READ = 4;
    }
}

/// The keys of a registration.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Hash)]
pub struct MrKeys {
    /// For work requests of this process.
    pub lkey: u32,
    /// For peers.
    pub rkey: u32,
}

/// What the caller wants of a queue pair.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct QpInit {
    /// Local port, from 1.
    pub port: u8,
    /// Index of the partition key.
    pub pkey_index: u16,
    /// Its queue key.
    pub qkey: QKey,
    /// Send work requests that can be outstanding.
    pub send_depth: u32,
    /// Receives that can be posted.
    pub recv_depth: u32,
    /// Scatter/gather elements per send.
    pub send_sge: u32,
    /// Inline bytes wanted.
    pub inline_len: u32,
}

/// What queue pairs of a device can have; 0 where it does not tell. For messages: what is asked for is tried all the same.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub struct QueueLimits {
    /// Work requests in one queue.
    pub depth: u32,
    /// Queue pairs on the device, of all its users.
    pub qps: u32,
}

/// What the caller got.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct QpCaps {
    /// Inline bytes per send.
    pub inline_len: u32,
    /// Scatter/gather elements per send.
    pub send_sge: u32,
    /// True if `post_send` copies all it needs before it returns: neither buffers nor address handle are looked at
    /// afterwards.
    pub copies_sends: bool,
    /// How many posted sends may wait for [`UdQp::ring`] and gain by it; 1 if posting is as good as ringing.
    pub send_batch: u32,
    /// True if [`UdQp::arm`] and [`UdQp::event_fd`] work.
    pub events: bool,
}

/// State of a queue pair, as far as users meet it.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum QpState {
    /// Works.
    ReadyToSend,
    /// Every posted and future work request is flushed with an error until [`UdQp::reset`].
    Error,
}

/// One element of a send's gather list.
#[derive(Copy, Clone, Debug)]
pub struct Sge<'a> {
    /// The bytes.
    pub bytes: &'a [u8],
    /// The registration that covers them; not looked at for inline sends.
    pub lkey: u32,
}

/// A UD send work request.
#[derive(Debug)]
pub struct SendWr<'a, A> {
    /// Counts the sends of this queue pair up from 1, without gaps. Comes back in [`SendWc::serial`].
    pub serial: u64,
    /// Where to.
    pub ah: &'a A,
    /// The queue pair there.
    pub remote_qpn: Qpn,
    /// The key there.
    pub remote_qkey: QKey,
    /// The payload, in order.
    pub sges: &'a [Sge<'a>],
    /// Copy the payload into the work request; it must fit [`QpCaps::inline_len`].
    pub inline: bool,
    /// Ask for a completion.
    pub signaled: bool,
    /// Wake a peer that armed for solicited completions.
    pub solicited: bool,
}

/// Status of a completion.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Hash)]
#[non_exhaustive]
pub enum WcStatus {
    /// Done.
    Success,
    /// The message did not fit the queue pair's limits, or its address handle cannot be used.
    LocalQpOp,
    /// A scatter/gather element is outside its registration.
    LocalProtection,
    /// A receive was too short for its message.
    LocalLength,
    /// The queue pair was in the ERROR state.
    WrFlush,
    /// Something else; the vendor's code. Never passed through `strerror`.
    Other(u32),
}

/// A completion of signaled sends: all sends up to `serial` are done.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct SendWc {
    /// The serial of the signaled send.
    pub serial: u64,
    /// Its status.
    pub status: WcStatus,
}

/// A completed receive.
#[derive(Debug)]
pub struct RecvWc {
    /// The buffer that was posted. Bytes 0..40 are the GRH area, the payload starts at 40.
    pub buf: Buf,
    /// Bytes written, the 40 included.
    pub byte_len: u32,
    /// The sending queue pair.
    pub src_qpn: Qpn,
    /// True if the GRH area holds a header (of which the first 20 bytes are undefined on RoCE v2 over IPv4).
    pub grh: bool,
    /// The sender asked to wake us.
    pub solicited: bool,
    /// Status. Unless it is `Success` only `buf` has meaning.
    pub status: WcStatus,
}

/// An event of a device or port.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Hash)]
#[non_exhaustive]
pub enum AsyncEvent {
    /// The port became ACTIVE.
    PortActive(u8),
    /// The port left ACTIVE.
    PortError(u8),
    /// The GID table of the port changed.
    GidChange(u8),
    /// The LID of the port changed.
    LidChange(u8),
    /// The subnet manager of the port changed.
    SmChange(u8),
    /// The subnet manager asks everybody to register again.
    ClientReregister(u8),
    /// The partition table of the port changed.
    PkeyChange(u8),
    /// A neighbour (next hop) of this GID changed its link address or failed.
    NeighbourChange(Gid),
    /// The device is gone or unusable until it is opened again.
    DeviceFatal,
    /// A queue pair fell into the ERROR state.
    QpFatal(Qpn),
    /// An event this library does not know; its raw number.
    Unknown(u32),
}

/// The answer of [`UdQp::arm`].
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum ArmResult {
    /// The next completion makes the event fd readable.
    Armed,
    /// There is something to poll already.
    Busy,
}

bitflags::bitflags! {
    /// Which completions make the event fd readable.
    #[derive(Copy, Clone, PartialEq, Eq, Debug)]
    pub struct ArmFor: u32 {
        /// Receive completions.
        const RECV = 1;
        /// Receive completions of solicited messages.
        const SOLICITED = 2;
        /// Send completions.
        const SEND = 4;
    }
}

/// An open device and its protection domain. All methods may be called from any thread.
pub trait Device: Send + Sync + 'static {
    /// An address handle. It is destroyed by [`Device::destroy_ah`], never by its own `Drop`, so that destroying is a call
    /// that can be counted, can fail, and never happens on a path that must not sleep.
    type Ah: Send + Sync + 'static;
    /// A UD queue pair with its two completion queues. It keeps the device alive.
    type UdQp: UdQp<Ah = Self::Ah>;

    /// What the device tells about itself.
    fn attr(&self) -> DeviceAttr;

    /// What a port tells about itself.
    ///
    /// # Errors
    /// `EINVAL` for a port that does not exist.
    fn query_port(&self, port: u8) -> VerbsResult<PortAttr>;

    /// The valid entries of a port's GID table, by index.
    ///
    /// # Errors
    /// `EINVAL` for a port that does not exist.
    fn query_gids(&self, port: u8) -> VerbsResult<Vec<GidEntry>>;

    /// Makes an address handle. May sleep (up to a second, see [`DeviceAttr::ah_create_sleeps`]).
    ///
    /// # Errors
    /// `ETIMEDOUT`: the peer's link address could not be resolved. `ENODATA`: the local GID is not in the table.
    /// `EINVAL`: a malformed destination. `ENOMEM`: the device's limit. `ENETUNREACH`: no route.
    fn create_ah(&self, attr: &AhAttr) -> VerbsResult<Self::Ah>;

    /// Destroys an address handle that no outstanding send names. May sleep.
    ///
    /// # Errors
    /// `EIO` after a fatal event; the handle is gone all the same.
    fn destroy_ah(&self, ah: Self::Ah) -> VerbsResult<()>;

    /// Registers a block. The device holds the block until [`Device::dereg_mr`].
    ///
    /// # Errors
    /// `ENOMEM`: the locked-memory or device limit.
    fn reg_mr(&self, block: &Arc<Block>, access: Access) -> VerbsResult<MrKeys>;

    /// Undoes a registration.
    ///
    /// # Errors
    /// `EINVAL` for keys that are not registered.
    fn dereg_mr(&self, keys: MrKeys) -> VerbsResult<()>;

    /// Makes a UD queue pair, ready to send and receive.
    ///
    /// # Errors
    /// `EINVAL`: a limit is exceeded or the port does not exist. `ENOMEM`: out of queue pairs or memory.
    fn create_ud_qp(self: &Arc<Self>, init: &QpInit) -> VerbsResult<Self::UdQp>;

    /// What queue pairs can have.
    fn queue_limits(&self) -> QueueLimits {
        QueueLimits::default()
    }

    /// The next async event, if there is one. Never blocks.
    fn poll_async_event(&self) -> Option<AsyncEvent>;
}

/// The part of a reset that may sleep, see [`UdQp::begin_reset`]. Dropped instead of called, it ends the reset with `ECANCELED`.
pub type ResetJob = Box<dyn FnOnce() + Send>;

/// Called when a reset is over, from the thread that has done it.
pub type ResetWaker = Arc<dyn Fn() + Send + Sync>;

/// A UD queue pair with its completion queues. Dropping it destroys it: nothing of it is read or written afterwards.
pub trait UdQp: Send + 'static {
    /// See [`Device::Ah`].
    type Ah: Send + Sync + 'static;

    /// Its number.
    fn qpn(&self) -> Qpn;

    /// What it can do.
    fn caps(&self) -> QpCaps;

    /// Its state.
    fn state(&self) -> QpState;

    /// Takes it from ERROR back to ready. Completions of what was flushed must have been polled before; posted receives
    /// stay the caller's to post again. May sleep, see [`UdQp::begin_reset`].
    ///
    /// # Errors
    /// The verbs error, if the device refuses.
    fn reset(&mut self) -> VerbsResult<()>;

    /// [`UdQp::reset`] for who must not sleep. `None`: it is done. Else it is under way, and the job is to be called where it may
    /// sleep; `wake` is called when that is over, and [`UdQp::finish_reset`] has the result.
    ///
    /// Meanwhile the state is [`QpState::Error`], what is posted is refused with `EBUSY`, nothing completes, and what is armed
    /// does not fire.
    ///
    /// # Errors
    /// As for [`UdQp::reset`]; `EBUSY` if a reset is under way.
    fn begin_reset(&mut self, wake: ResetWaker) -> VerbsResult<Option<ResetJob>> {
        let _ = wake;
        self.reset().map(|()| None)
    }

    /// What came of the reset that was begun; it counts as under way until this has told. `None` if there is none or the job is
    /// not done.
    fn finish_reset(&mut self) -> Option<VerbsResult<()>> {
        None
    }

    /// Destroys it, and then drops `rest`: what was posted may name it. While a reset is under way, both are done at the end of
    /// that by the thread that has it, and this does not wait.
    fn destroy(self, rest: Box<dyn Send>)
    where
        Self: Sized,
    {
        drop(self);
        drop(rest);
    }

    /// Posts one send. It leaves at once, or together with others at the next [`UdQp::ring`] where
    /// [`QpCaps::send_batch`] is above 1. A message above the port's MTU completes with success and is not sent.
    ///
    /// # Errors
    /// `ENOMEM`: the send queue is full (the caller counts credits, so this is its bug). `EINVAL`: too many elements, or
    /// inline data above the limit; nothing was posted.
    fn post_send(&mut self, wr: &SendWr<'_, Self::Ah>) -> VerbsResult<()>;

    /// [`UdQp::post_send`] and [`UdQp::ring`] in one.
    ///
    /// # Errors
    /// Those of [`UdQp::post_send`].
    #[inline]
    fn post_send_now(&mut self, wr: &SendWr<'_, Self::Ah>) -> VerbsResult<()> {
        self.post_send(wr)?;
        self.ring();
        Ok(())
    }

    /// Lets everything that was posted leave.
    fn ring(&mut self);

    /// Posts receives: takes buffers off the end of `bufs` until it is empty or the queue is full. Each must be longer
    /// than [`GRH_LEN`].
    ///
    /// # Errors
    /// The verbs error; buffers not taken are still in `bufs`.
    fn post_recv(&mut self, bufs: &mut Vec<Buf>) -> VerbsResult<()>;

    /// Appends at most `max` send completions to `out` and returns how many.
    fn poll_send(&mut self, out: &mut Vec<SendWc>, max: usize) -> usize;

    /// Appends at most `max` receive completions to `out` and returns how many.
    fn poll_recv(&mut self, out: &mut Vec<RecvWc>, max: usize) -> usize;

    /// [`UdQp::poll_recv`] for who handles one completion at a time: looks for at most `max` of them, answers how many there
    /// are, and leaves them to be taken by [`UdQp::next_recv`], in their order, until that has none. `room` is empty then;
    /// it is for devices that have no place of their own.
    #[inline]
    fn start_recv(&mut self, room: &mut Vec<RecvWc>, max: usize) -> usize {
        let n = self.poll_recv(room, max);
        // Taken off the end, the first one first.
        room.reverse();
        n
    }

    /// See [`UdQp::start_recv`].
    #[inline]
    fn next_recv(&mut self, room: &mut Vec<RecvWc>) -> Option<RecvWc> {
        room.pop()
    }

    /// [`UdQp::next_recv`] if that is a success, and at hand, as nearly all are; `None` takes nothing, and is no answer.
    #[inline]
    fn next_success(&mut self, room: &mut Vec<RecvWc>) -> Option<RecvWc> {
        room.pop_if(|wc| wc.status == WcStatus::Success)
    }

    /// Asks for the event fd to become readable at the next completion of the kinds in `what`, once. Drains the fd first.
    ///
    /// # Errors
    /// `EOPNOTSUPP` without [`QpCaps::events`].
    fn arm(&mut self, what: ArmFor) -> VerbsResult<ArmResult>;

    /// The fd that [`UdQp::arm`] speaks of, for `poll` and `epoll` only. `None` without [`QpCaps::events`].
    fn event_fd(&self) -> Option<RawFd>;
}
