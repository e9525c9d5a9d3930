#[cfg(test)]
mod basic;
#[cfg(test)]
mod budgets;
#[cfg(test)]
mod chaos;
#[cfg(test)]
mod closing;
pub mod fuzz;
#[cfg(test)]
mod golden;
#[cfg(test)]
mod handshake;
#[cfg(test)]
mod hazards;
#[cfg(test)]
mod hostile;
#[cfg(test)]
mod loss;
// The fuzz targets use it, too, in programs that are no tests.
#[cfg_attr(uct_fuzz, allow(dead_code))]
mod net;
#[cfg(test)]
mod parity;
#[cfg(test)]
mod regressions;
#[cfg(test)]
mod silence;
#[cfg(test)]
mod table;
#[cfg(test)]
mod violence;
#[cfg(test)]
mod window;
