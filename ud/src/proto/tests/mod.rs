mod basic;
mod chaos;
mod net;
