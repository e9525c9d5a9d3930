//! [`Tags`]: the usage tags of gets as bits, so that an entry can remember who had it in one word.

#[derive(Default)]
pub(super) struct Tags {
    names: Vec<&'static str>,
    /// The tag of the last get and its bit.
    last: (&'static str, u32),
}

impl Tags {
    const MAX: usize = 30;

    /// The bit of `name`; the top bit if there are too many.
    #[inline]
    pub(super) fn bit(&mut self, name: &'static str) -> u32 {
        // Tags are constants, so that pointers are nearly always equal when names are.
        if !std::ptr::eq(self.last.0, name) || self.last.1 == 0 {
            self.last = (name, self.intern(name));
        }
        self.last.1
    }

    #[cold]
    fn intern(&mut self, name: &'static str) -> u32 {
        if let Some(i) = self.names.iter().position(|n| *n == name) {
            return 1 << i;
        }
        if self.names.len() == Self::MAX {
            return 1 << Self::MAX;
        }
        self.names.push(name);
        1 << (self.names.len() - 1)
    }

    /// The names in `users`.
    pub(super) fn words(&self, users: u32) -> String {
        let mut words: Vec<&str> =
            self.names.iter().enumerate().filter(|(i, _)| users & 1 << i != 0).map(|(_, n)| *n).collect();
        if users & 1 << Self::MAX != 0 {
            words.push("others");
        }
        words.join(", ")
    }
}
