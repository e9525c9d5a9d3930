//! Packet sequence numbers: 16 bits that wrap.

use std::fmt;

/// A packet sequence number.
///
/// It has no `Ord`: order on a circle is a question about two numbers that are less than half the circle apart, so it is asked
/// by name ([`Psn::is_after`]). Two numbers exactly half the circle apart are neither before nor after each other, so that a
/// made-up number from the wire can never count as progress.
#[derive(Copy, Clone, PartialEq, Eq, Default)]
pub(super) struct Psn(u16);

impl Psn {
    pub(super) const fn new(raw: u16) -> Psn {
        Psn(raw)
    }

    pub(super) const fn raw(self) -> u16 {
        self.0
    }

    pub(super) const fn next(self) -> Psn {
        self.add(1)
    }

    pub(super) const fn prev(self) -> Psn {
        Psn(self.0.wrapping_sub(1))
    }

    pub(super) const fn add(self, n: u16) -> Psn {
        Psn(self.0.wrapping_add(n))
    }

    /// How many steps lead from `earlier` to `self`, going forward.
    pub(super) const fn since(self, earlier: Psn) -> u16 {
        self.0.wrapping_sub(earlier.0)
    }

    pub(super) const fn is_after(self, other: Psn) -> bool {
        self.0.wrapping_sub(other.0).cast_signed() > 0
    }

    pub(super) const fn is_before(self, other: Psn) -> bool {
        other.is_after(self)
    }

    /// `self` is `other` or before it.
    pub(super) const fn is_upto(self, other: Psn) -> bool {
        other.0.wrapping_sub(self.0).cast_signed() >= 0
    }
}

impl fmt::Debug for Psn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Psn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
