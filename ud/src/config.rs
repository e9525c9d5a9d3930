//! Settings of the UD transport: UCX's names, defaults and meanings.

use std::time::Duration;

use ib::config::IfaceConfig;
use uct::{
    Error, ErrorKind, Result,
    config::{Env, Scope, Section},
};

/// Names of the settings of UD alone.
pub const SCOPE: Scope = Scope { prefixes: &["UD_", "UD_VERBS_"], transports: "ud_verbs" };

/// All settings of a UD interface, for a [`Catalog`](uct::config::Catalog).
pub const SECTIONS: &[Section] =
    &[Section { table: IfaceConfig::TABLE, scope: &ib::config::UD }, Section { table: UdConfig::TABLE, scope: &SCOPE }];

/// One send completion is asked for every so many sends, so the queue must be longer.
const TX_MODERATION: u32 = 64;

uct::config_table! {
    /// Settings of a UD interface.
    pub struct UdConfig ("UD") {
        /// How many receive buffers are given to the device before the program enables receiving.
        rx_queue_len_init: u32 = "RX_QUEUE_LEN_INIT", "128", where |n| *n >= 1, "must be at least 1";
        /// How long a destroyed endpoint goes on answering and resending to its peer.
        linger_timeout: Duration = "LINGER_TIMEOUT", "5m";
        /// How long a peer may be silent, while something waits for its answer, until it is declared dead.
        timeout: Duration = "TIMEOUT", "30s", where |t| !t.is_zero(), "must be above 0";
        /// How long to wait for an acknowledgement until the peer is asked for it, at first.
        timer_tick: Duration = "TIMER_TICK", "10ms", where is_period, "must be above 0 and not inf";
        /// By how much this wait is multiplied each time the peer does not answer.
        timer_backoff: f64 = "TIMER_BACKOFF", "2", where |f| *f >= 1.0, "must be at least 1";
        /// How often progress is made in the background while the program does not make any.
        async_timer_tick: Duration = "ASYNC_TIMER_TICK", "100ms", where is_period, "must be above 0 and not inf";
        /// The peer is woken up by a request for an acknowledgement once the wait for it has grown to this.
        min_poke_time: Duration = "MIN_POKE_TIME", "250ms";
        /// Drop packets on Ethernet whose destination address is not that of this interface.
        eth_dgid_check: bool = "ETH_DGID_CHECK", "y";
        /// The largest number of packets that wait for acknowledgement, plus one. It adapts to losses below this.
        max_window: u32 = "MAX_WINDOW", "1025", where |n| (2..=1025).contains(n), "must be from 2 to 1025";
        /// How many received packets one round of background progress takes at most.
        rx_async_max_poll: u32 = "RX_ASYNC_MAX_POLL", "64", where |n| *n >= 1, "must be at least 1";
        /// Make progress in the background, on a thread of the interface's worker, while the program does not make any.
        /// Without it, a program that computes for longer than TIMEOUT is declared dead by its peers. Of this library,
        /// not of UCX, where it is always on.
        async_progress: bool = "ASYNC_PROGRESS", "y";
    }
}

fn is_period(t: &Duration) -> bool {
    !t.is_zero() && *t != Duration::MAX
}

impl UdConfig {
    /// Reads the settings.
    ///
    /// # Errors
    /// `InvalidConfig` for a value that does not parse or is out of range.
    pub fn from_env(env: &Env) -> Result<Self> {
        Self::read(env, &SCOPE)
    }
}

/// Reads the settings that UD shares with other transports, and checks what UD needs of them.
///
/// # Errors
/// `InvalidConfig` for a value that does not parse or is out of range.
pub fn iface_config(env: &Env) -> Result<IfaceConfig> {
    let config = IfaceConfig::from_env(env, &ib::config::UD)?;
    check_iface(&config)?;
    Ok(config)
}

/// Checks what UD needs of settings that a program may have changed by hand.
///
/// # Errors
/// `InvalidConfig` if the send queue is too short for one completion per 64 sends.
pub fn check_iface(config: &IfaceConfig) -> Result<()> {
    if config.tx_queue_len <= TX_MODERATION {
        return Err(Error::new(
            ErrorKind::InvalidConfig,
            format!(
                "UCX_UD_TX_QUEUE_LEN={}: must be above {TX_MODERATION} for ud_verbs, which asks for a completion every \
                 {TX_MODERATION} sends",
                config.tx_queue_len
            ),
        ));
    }
    Ok(())
}

#[cfg(all(test, not(uct_loom)))]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_those_of_ucx() {
        let c = UdConfig::default();
        assert_eq!(c.linger_timeout, Duration::from_secs(300));
        assert_eq!(c.timeout, Duration::from_secs(30));
        assert_eq!(c.timer_tick, Duration::from_millis(10));
        assert_eq!((c.timer_backoff, c.max_window, c.rx_async_max_poll), (2.0, 1025, 64));
        assert_eq!(c.async_timer_tick, Duration::from_millis(100));
        assert_eq!(c.min_poke_time, Duration::from_millis(250));
        assert!(c.eth_dgid_check && c.async_progress);
        assert_eq!(c, UdConfig::from_env(&Env::empty()).unwrap());
        let iface = iface_config(&Env::empty()).unwrap();
        assert_eq!((iface.tx_queue_len, iface.rx_queue_len, iface.seg_size.0), (256, 4096, 8192));
    }

    #[test]
    fn values_out_of_range_are_refused_by_name() {
        for (name, value, message) in [
            ("UCX_UD_MAX_WINDOW", "1", "UCX_UD_MAX_WINDOW=1: must be from 2 to 1025"),
            ("UCX_UD_VERBS_MAX_WINDOW", "1026", "UCX_UD_VERBS_MAX_WINDOW=1026: must be from 2 to 1025"),
            ("UCX_UD_TIMER_BACKOFF", "0.9", "must be at least 1"),
            ("UCX_UD_TIMER_TICK", "0", "must be above 0"),
            ("UCX_UD_ASYNC_TIMER_TICK", "inf", "must be above 0 and not inf"),
            ("UCX_UD_TIMEOUT", "0", "must be above 0"),
            ("UCX_UD_RX_ASYNC_MAX_POLL", "0", "must be at least 1"),
        ] {
            let e = UdConfig::from_env(&Env::from_pairs([(name, value)])).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::InvalidConfig);
            assert!(e.to_string().contains(message), "{e}");
        }
        let e = iface_config(&Env::from_pairs([("UCX_IB_TX_QUEUE_LEN", "64")])).unwrap_err();
        assert!(e.to_string().contains("must be above 64 for ud_verbs"), "{e}");
    }

    #[test]
    fn later_names_win() {
        let env = Env::from_pairs([
            ("UCX_IB_SEG_SIZE", "1k"),
            ("UCX_UD_SEG_SIZE", "2k"),
            ("UCX_UD_TIMEOUT", "1m"),
            ("UCX_UD_VERBS_TIMEOUT", "2m"),
            // Fields of IB level have no bare form, and fields of UD none under IB_.
            ("UCX_TX_QUEUE_LEN", "100"),
            ("UCX_IB_MAX_WINDOW", "9"),
        ]);
        let (iface, ud) = (iface_config(&env).unwrap(), UdConfig::from_env(&env).unwrap());
        assert_eq!((iface.seg_size.0, iface.tx_queue_len), (2048, 256));
        assert_eq!((ud.timeout, ud.max_window), (Duration::from_secs(120), 1025));
    }
}
