//! [`Tags`]: the usage tags of gets as bits, so that an entry can remember who had it in one word.

#[derive(Default)]
pub(super) struct Tags {
    names: Vec<&'static str>,
}

impl Tags {
    const MAX: usize = 31;

    /// The bit of `name`; the top bit if there are too many.
    #[inline]
    pub(super) fn bit(&mut self, name: &'static str) -> u32 {
        // Tags are constants, so that pointers are nearly always equal when names are.
        match self.names.iter().position(|n| std::ptr::eq(*n, name)) {
            Some(i) => 1 << i,
            None => self.intern(name),
        }
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
