//! What suites about bad networks need of a fabric beyond [`Fabric`]: hooks on packets, and what a device noticed.

use ib::{
    sim::{Faults, SimDevice},
    soft::SoftDevice,
    sw::{Filter, FilterVerdict, Injector},
};

use crate::{
    fabric::{Fabric, Sim, Soft},
    world::World,
};

/// A fabric whose devices have hooks on their packets.
pub trait Hooks: Fabric {
    /// Sets or takes away the hook on packets that leave.
    fn set_tx_filter(device: &Self::Device, filter: Option<Filter>);

    /// Sets or takes away the hook on packets that arrive.
    fn set_rx_filter(device: &Self::Device, filter: Option<Filter>);

    /// What transports did that verbs forbids.
    fn violations(device: &Self::Device) -> Vec<String>;

    /// What is still alive on any device.
    fn leaks(&self) -> Vec<String>;

    /// What is still alive on one device.
    fn device_leaks(device: &Self::Device) -> Vec<String>;

    /// Loses this share of the packets that arrive, in parts per million, chosen by `seed`. 0 stops it.
    fn set_loss(device: &Self::Device, seed: u64, ppm: u32) {
        let injector = Injector { seed, loss_ppm: ppm, ..Injector::default() };
        Self::set_rx_filter(device, (ppm > 0).then(|| injector.into_filter()));
    }
}

impl Hooks for Sim {
    fn set_tx_filter(device: &SimDevice, filter: Option<Filter>) {
        device.set_tx_filter(filter);
    }

    fn set_rx_filter(device: &SimDevice, filter: Option<Filter>) {
        device.set_rx_filter(filter);
    }

    fn violations(device: &SimDevice) -> Vec<String> {
        device.violations()
    }

    fn leaks(&self) -> Vec<String> {
        self.net.leaks()
    }

    fn device_leaks(device: &SimDevice) -> Vec<String> {
        let live = device.live();
        if live.is_zero() { Vec::new() } else { vec![format!("{live:?}")] }
    }
}

impl Hooks for Soft {
    fn set_tx_filter(device: &SoftDevice, filter: Option<Filter>) {
        device.tx_filter().set(filter);
    }

    fn set_rx_filter(device: &SoftDevice, filter: Option<Filter>) {
        device.rx_filter().set(filter);
    }

    fn violations(_device: &SoftDevice) -> Vec<String> {
        Vec::new()
    }

    fn leaks(&self) -> Vec<String> {
        Vec::new()
    }

    fn device_leaks(device: &SoftDevice) -> Vec<String> {
        match device.qps().live() {
            0 => Vec::new(),
            n => vec![format!("{n} queue pairs")],
        }
    }
}

/// The kind of a packet, as [`ud::proto::describe`] names it: `AM`, `CREQ`, `CREP`, `ACK`, `NACK`, `CTL`, ...
pub fn kind_of(payload: &[u8]) -> String {
    let text = ud::proto::describe(payload).to_string();
    text.split(' ').next().unwrap_or_default().to_string()
}

/// A filter that loses the first `n` packets of a kind.
pub fn lose_first(kind: &'static str, mut n: u32) -> Filter {
    Box::new(move |p| {
        if n > 0 && kind_of(p.payload) == kind {
            n -= 1;
            FilterVerdict::Drop
        } else {
            FilterVerdict::Pass
        }
    })
}

/// A network that loses, doubles and reorders, each with a probability in percent.
#[derive(Copy, Clone, Debug, Default)]
pub struct Weather {
    /// Percent of the packets that are lost.
    pub loss: u32,
    /// Percent that arrive twice.
    pub dup: u32,
    /// Percent that are overtaken.
    pub reorder: u32,
}

impl Weather {
    /// The same as faults of a simulated network.
    pub fn faults(self) -> Faults {
        Faults {
            loss_ppm: self.loss * 10_000,
            dup_ppm: self.dup * 10_000,
            reorder_ppm: self.reorder * 10_000,
            reorder_ns: 20_000,
            ..Faults::default()
        }
    }

    /// The same as a filter.
    pub fn filter(self, seed: u64) -> Option<Filter> {
        if self.loss + self.dup + self.reorder == 0 {
            return None;
        }
        let (loss_ppm, dup_ppm, reorder_ppm) = (self.loss * 10_000, self.dup * 10_000, self.reorder * 10_000);
        Some(Injector { seed, loss_ppm, dup_ppm, reorder_ppm }.into_filter())
    }
}

impl<F: Hooks> World<F> {
    /// Changes the weather between all nodes, by filters on what they send.
    pub fn set_weather(&self, weather: Weather) {
        for (i, n) in self.nodes.iter().enumerate() {
            F::set_tx_filter(&n.device, weather.filter(self.seed.wrapping_add(i as u64)));
        }
    }
}
