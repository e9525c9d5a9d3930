mod basic;
mod net;
